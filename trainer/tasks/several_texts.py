"""Tasks with several texts in a row, which the model reads one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from trainer.base.errors import UsageError
from trainer.parallel.dtypes import at_least_fp32
from trainer.tasks.task import TextTask

if TYPE_CHECKING:
    from typing_extensions import Self


class SeveralTexts(TextTask):
    """A task with several texts in a row, which an encoder or a decoder reads one by one.

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


_DRAWS = 5
_MOST_DRAWN = 2_000  # rows; more would take seconds at each start


def mean_of_draws(metrics: Callable[[Tensor], Mapping[str, float]], shape: Sequence[int]) -> dict[str, float]:
    """Return the mean metrics of some tensors of normal numbers `[rows, ...]`; none for very many rows."""
    if shape[0] > _MOST_DRAWN:
        return {}
    generator = torch.Generator().manual_seed(0)
    found = [metrics(torch.randn(*shape, generator=generator)) for _ in range(_DRAWS)]
    return {name: sum(one[name] for one in found) / _DRAWS for name in found[0]}


class ScoredTexts(SeveralTexts):
    """A task with one number for each text."""

    auto_class_name = "AutoModelForSequenceClassification"

    def scores(self, output: Any, inputs: Mapping[str, Tensor], labels: Tensor | None = None) -> Tensor:
        """Return the numbers `[batch, texts]` in fp32 at least."""
        return at_least_fp32(output.logits).view(len(inputs["input_ids"]), -1)
