"""The exported folder of a task: its model card, its files beside the weights, and how other programs compute it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from trainer.tasks.types import Dataset

TEXT_TO_TEXT = "text2text-generation"


@dataclass(frozen=True)
class Card:
    """The facts of a task for model cards and adapters; the defaults suit a head of transformers.

    In `usage` and `graph`, ARCHITECTURE, PROMPT and FIRST_TOKEN stand for the class of the model, for an example of its
    input, and for the first token of a decoder.

    Attributes:
        pipeline_tag: the name of the task on the hub; None: it has none.
        has_pipeline: whether transformers 5 has a pipeline of this name.
        peft_type: the type of the task in PEFT; None: PEFT has none.
        program: the library that opens the folder, and the form in which it does.
        processor: the class of transformers that prepares rows, and `rows`, an example of its arguments.
        usage: lines of Python that use the folder; empty: a pipeline, or else the class of the model.
        graph: lines of Python that complete the inputs of a graph.
    """

    pipeline_tag: str | None = None
    has_pipeline: bool = True
    peft_type: str | None = None
    program: Literal["transformers", "sentence-transformers", "cross-encoder"] = "transformers"
    processor: str = "AutoTokenizer"
    rows: str = '["..."]'
    usage: str = ""
    graph: str = ""

    @property
    def library(self) -> str:
        return "transformers" if self.program == "transformers" else "sentence-transformers"


GENERATION = Card("text-generation", peft_type="CAUSAL_LM")
TEXT_CLASSIFICATION = Card("text-classification", peft_type="SEQ_CLS")


class ExportedFolder:
    """The folder of a task in other programs; the default is one that transformers computes whole."""

    def files(self, max_length: int, hidden_size: int | None) -> dict[str, Any]:
        """Return the contents of further JSON files, by their path in the folder.

        Args:
            hidden_size: the size of the model's hidden states; None if its configuration does not name it.
        """
        return {}

    def graph_head(self) -> tuple[nn.Module, tuple[str, ...]] | None:
        """Return the module that a graph computes from the last hidden states, and the columns that it gets.

        None: a graph has the outputs of the model.
        """
        return None

    def inputs(self, rows: Dataset) -> dict[str, Any]:
        """Return the texts of rows, as JSON, for the program of the card, if that is not transformers."""
        return {}

    def scores(self, outputs: Tensor, rows: Dataset) -> Tensor:
        """Return the scores `[rows, ...]` from the outputs of that program for all rows."""
        return outputs

    def completed(self, scores: Tensor, trained: Tensor) -> Tensor:
        """Return the scores of another program, with those of the trained model that no other program computes."""
        return scores
