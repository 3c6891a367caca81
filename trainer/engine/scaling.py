"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, arXiv:1710.03740).

A step is skipped if an element of the scaled gradient of the global batch is above the largest number of fp16. This sum
over rows is in fp32, so ranks and microbatches do not change the decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from trainer.base.errors import NonFiniteError
from trainer.engine.results import StepResult

LARGEST = torch.finfo(torch.float16).max
"""The largest element of the scaled gradient of a step that is not skipped."""
# The initial scale and the interval are the defaults of torch's `GradScaler`.
_INITIAL, _SMALLEST = 2.0**16, 1.0
_GROWTH_INTERVAL = 2000
_PREFIX = "loss_scaler."


class LossScaler:
    """The factor of the loss, on the device, so that a step need not wait until the host has read the one before.

    It halves at each step with a non-finite global gradient norm, and doubles after `_GROWTH_INTERVAL` good steps. The
    norm is equal on all ranks, so they decide alike without communication.
    """

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), _INITIAL, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)  # since the last change
        self.skipped_steps = 0
        """The skipped steps among those that the host has read."""

    def update(self, flag: Tensor) -> None:
        """Change the factor after a step, without a wait; `flag` is 1.0 if the step was bad, and else 0.0."""
        # The kernel of torch's `GradScaler`: it reads the flag on the device and resets the count of good steps.
        torch._amp_update_scale_(self.scale, self._good_steps, flag, 2.0, 0.5, _GROWTH_INTERVAL)

    def settle(self, result: StepResult) -> StepResult:
        """Count a step that the host has read, and return its result with the number of skipped steps.

        Args:
            result: loss, norm and scale, equal on all ranks. If they are not finite, the step changed no weights.

        Raises:
            NonFiniteError: the scale falls below 1.
        """
        if not result.is_finite:
            skipped = self.skipped_steps + 1
            assert result.loss_scale is not None
            # The device has halved its scale already; the host repeats the arithmetic on the number that it read.
            if result.loss_scale / 2.0 < _SMALLEST:
                raise NonFiniteError(
                    f"the loss scale of fp16 fell below {_SMALLEST:g} after {skipped} skipped steps: the model"
                    " itself leaves the range of fp16. Use `precision` bf16 or fp32, or lower"
                    " `optimizer.learning_rate`"
                )
            self.skipped_steps = skipped
        return replace(result, skipped_steps=self.skipped_steps)

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint, by name, after all steps are settled."""
        found = {"scale": self.scale.item(), "good_steps": int(self._good_steps), "skipped_steps": self.skipped_steps}
        return {f"{_PREFIX}{key}": value for key, value in found.items()}

    def load_state(self, scalars: Mapping[str, float]) -> None:
        self.scale.fill_(scalars[f"{_PREFIX}scale"])
        self._good_steps.fill_(int(scalars[f"{_PREFIX}good_steps"]))
        self.skipped_steps = skipped_steps(scalars)


def skipped_steps(scalars: Mapping[str, float]) -> int:
    """Return the number of skipped steps in the numbers of a checkpoint; 0 without loss scaling."""
    return int(scalars.get(f"{_PREFIX}skipped_steps", 0))
