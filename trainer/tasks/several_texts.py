"""Tasks with several texts in a row, which the model reads one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from trainer.base.errors import UsageError
from trainer.parallel.dtypes import at_least_fp32
from trainer.tasks.task import TextTask

if TYPE_CHECKING:
    from typing_extensions import Self


class SeveralTexts(TextTask):
    """A task whose model is an encoder or a decoder, and reads each text by itself.

    `recipe_type` is the value of `task.type`.
    """

    recipe_type: ClassVar[str]

    def for_configuration(self, config: Any) -> Self:
        if config.is_encoder_decoder:
            raise UsageError(
                f"`task.type` is {self.recipe_type}, which needs an encoder or a decoder, but the model is of type"
                f" {config.model_type}, which has both; use another model"
            )
        return self

    def model_inputs(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs `[batch * texts, sequence]`."""
        return {name: tensor.flatten(0, -2) for name, tensor in inputs.items()}


class ScoredTexts(SeveralTexts):
    """A task with one number for each text."""

    auto_class_name = "AutoModelForSequenceClassification"

    def scores(self, output: Any, inputs: Mapping[str, Tensor], labels: Tensor | None = None) -> Tensor:
        """Return the numbers `[batch, texts]` in fp32 at least."""
        return at_least_fp32(output.logits).view(len(inputs["input_ids"]), -1)
