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
from trainer.engine.results import SKIPPED_STEPS, StepResult

# The initial scale and the interval are the defaults of torch's `GradScaler`.
_INITIAL, _SMALLEST = 2.0**16, 1.0
_GROWTH_INTERVAL = 2000
_SCALE, _GOOD_STEPS = "loss_scaler.scale", "loss_scaler.good_steps"  # of a checkpoint


class DynamicScaler:
    """The factor of the loss, on the device, so that a step need not wait until the host has read the one before.

    It halves at each step with a non-finite global gradient norm, and doubles after `_GROWTH_INTERVAL` good steps. The
    norm is equal on all ranks, so they decide alike without communication.
    """

    largest = torch.finfo(torch.float16).max

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), _INITIAL, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)  # since the last change
        self.skipped_steps = 0

    def update(self, flag: Tensor) -> None:
        # The kernel of torch's `GradScaler`: it reads the flag on the device and resets the count of good steps.
        torch._amp_update_scale_(self.scale, self._good_steps, flag, 2.0, 0.5, _GROWTH_INTERVAL)

    def settle(self, result: StepResult) -> StepResult:
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
        return {_SCALE: self.scale.item(), _GOOD_STEPS: int(self._good_steps), SKIPPED_STEPS: self.skipped_steps}

    def load_state(self, scalars: Mapping[str, float]) -> None:
        self.scale.fill_(scalars[_SCALE])
        self._good_steps.fill_(int(scalars[_GOOD_STEPS]))
        self.skipped_steps = int(scalars[SKIPPED_STEPS])
