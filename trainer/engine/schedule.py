"""How the microbatches of one step go through the model.

Here: one after the other, gradients accumulating. With pipeline stages: `pipelined.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from trainer.parallel.microbatch import Microbatch


class Schedule(Protocol):
    """Forward and backward of the microbatches of one step."""

    def run(self, microbatches: Sequence[Microbatch], denominator: Tensor, scale: float) -> Tensor:
        """Accumulates the gradient of scale * (sum of losses) / denominator; see `AccumulationSchedule.run`."""
        ...

    def idle_share(self) -> float | None:
        """The share of the time in `run` in which this rank had nothing to do; None where it always has."""
        ...


class AccumulationSchedule:
    """Forward and backward of each microbatch in turn; gradients are synchronised in the last backward only.

    Args:
        loss_sum: the sum of losses of a microbatch, a scalar with a graph.
        no_sync: a context in which a backward pass keeps its gradients to itself.
    """

    def __init__(
        self, loss_sum: Callable[[Microbatch], Tensor], no_sync: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._loss_sum = loss_sum
        self._no_sync = no_sync

    def run(self, microbatches: Sequence[Microbatch], denominator: Tensor, scale: float) -> Tensor:
        """Accumulates the gradient of scale * (sum of losses) / denominator.

        Args:
            microbatches: of this rank, at least one.
            denominator: valid labels in the whole global batch, a scalar.
            scale: the loss scale of fp16, else 1.

        Returns:
            This rank's share of the loss, unscaled: its sum of losses / denominator, a detached scalar.
        """
        total = torch.zeros((), device=denominator.device)
        for index, microbatch in enumerate(microbatches):
            with nullcontext() if index == len(microbatches) - 1 else self._no_sync():
                loss = self._loss_sum(microbatch) / denominator
                (loss * scale if scale != 1.0 else loss).backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach()
        return total

    def idle_share(self) -> None:
        return None
