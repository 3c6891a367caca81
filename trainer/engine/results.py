"""The numbers of one optimizer step, and of one microbatch of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from trainer.parallel.copying import begin_to_host

SKIPPED_STEPS = "loss_scaler.skipped_steps"
"""The number of a checkpoint with the steps that a loss scale skipped."""


@dataclass(frozen=True)
class StepResult:
    """The numbers of one optimizer step, equal on all ranks."""

    loss: float  # over the whole global batch: sum of losses / number of valid labels
    grad_norm: float  # of the whole model, unscaled, before clipping
    learning_rate: float
    loss_scale: float | None = None  # that this step used; fp16 only
    skipped_steps: int | None = None  # so far, this one included; fp16 only
    more: Callable[[], Mapping[str, float]] = dict  # reads further numbers, such as those of experts

    @property
    def is_finite(self) -> bool:
        """Whether loss and norm are finite, so the step was taken."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def is_bad(self) -> bool:
        """Whether the step is non-finite, and not from an fp16 overflow, which leaves the loss finite."""
        return not self.is_finite and (self.loss_scale is None or not math.isfinite(self.loss))


@dataclass(frozen=True)
class EvalResult:
    """This rank's result of one microbatch of an evaluation; empty for a filler."""

    loss_sum: float
    num_valid: int
    predictions: dict[str, Tensor]  # on the CPU, each [batch, ...], in the order of the microbatch's rows

    @classmethod
    def begin_read(
        cls, loss_sum: Tensor | None, num_valid: int, predictions: Mapping[str, Tensor]
    ) -> Callable[[], EvalResult]:
        """Begin to copy the tensors of a result to the host, and return a function that waits for them."""
        read_loss = begin_to_host({} if loss_sum is None else {"loss_sum": loss_sum})
        read = begin_to_host(predictions)
        return lambda: cls(sum(loss.item() for loss in read_loss().values()), num_valid, read())
