"""The interface of the generation of texts, which a feature registers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor, nn

from trainer.base.errors import UsageError
from trainer.base.extensions import sole
from trainer.recipe.plan import RunPlan
from trainer.tasks.task import Task
from trainer.tasks.types import Tokenizer

GENERATED = "generated"
"""The generated tokens in predictions and answers, `[batch, tokens]`, padded with `IGNORED_LABEL`."""


class TextGenerator(ABC):
    """The generation of texts by models of transformers."""

    @abstractmethod
    def require_whole(self, plan: RunPlan) -> None:
        """Refuse plans in which a rank cannot generate texts.

        Raises:
            UsageError: a rank holds a part of the model or of its inputs, or layers work without padding.
        """

    @abstractmethod
    def configure(self, model: nn.Module, task: Task, tokenizer: Tokenizer | None) -> None:
        """Set the generation configuration of a model, which an export includes.

        Args:
            tokenizer: the tokenizer of the texts; None: rows are tokens.
        """

    @abstractmethod
    def tokens(self, model: nn.Module, inputs: Mapping[str, Tensor], synced: bool, seed: int, rows: Tensor) -> Tensor:
        """Return the tokens `GENERATED` of a model after `configure`, in evaluation mode.

        Args:
            inputs: `input_ids` and `attention_mask`, each `[batch, sequence]`, padded on the right.
            synced: whether each forward pass is a collective of all ranks, which must then run equally many.
            rows: the index of each row `[batch]`, which keys its sampled tokens.
        """

    @abstractmethod
    def texts(self, generated: Tensor, tokenizer: Tokenizer | None) -> list[str]:
        """Return the text of each row of tokens, without special tokens."""

    @abstractmethod
    def continuing(self, task: Task) -> Task:
        """Return the task that continues texts or prompts, from the task that trains a causal language model."""


def text_generator() -> TextGenerator | None:
    """Return the registered generator; None: there is none."""
    generator: TextGenerator | None = sole("generator")
    return generator


def required_generator() -> TextGenerator:
    """Return the registered generator.

    Raises:
        UsageError: there is none.
    """
    if (generator := text_generator()) is None:
        raise UsageError(
            "the predictions and some metrics of this task need generated texts, but no generator of texts is"
            " installed; use other metrics, such as perplexity"
        )
    return generator
