"""Forward and backward passes of the microbatches of one step; `pipelined.py` has those of pipelines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from trainer.parallel.gradients import OverlappedSums
from trainer.parallel.microbatch import Microbatch


class Schedule(Protocol):
    """Forward and backward of the microbatches of one step."""

    def run(self, microbatches: Sequence[Microbatch], denominator: Tensor, scale: Tensor | None) -> Tensor:
        """Accumulate the gradient of scale * (sum of losses) / denominator; see `AccumulationSchedule.run`."""
        ...

    def idle_share(self) -> float | None:
        """Return the idle share of the time in `run`; None without a pipeline."""
        ...


class AccumulationSchedule:
    """Forward and backward of each microbatch in turn, with gradient sync in the last backward pass only.

    Args:
        loss_sum: returns the sum of losses of a microbatch, a scalar with a graph.
        no_sync: returns a context without gradient sync.
        sums: the sums of gradients that the wrapper of the model leaves out; None: there are none.
    """

    def __init__(
        self,
        loss_sum: Callable[[Microbatch], Tensor],
        no_sync: Callable[[], AbstractContextManager[None]],
        sums: OverlappedSums | None = None,
    ) -> None:
        self._loss_sum = loss_sum
        self._no_sync = no_sync
        self._sums = sums

    def run(self, microbatches: Sequence[Microbatch], denominator: Tensor, scale: Tensor | None) -> Tensor:
        """Accumulate the gradient of scale * (sum of losses) / denominator.

        Args:
            microbatches: this rank's microbatches, at least one.
            denominator: the number of valid labels in the global batch, a scalar.
            scale: the loss scale of fp16, a scalar; None: 1.

        Returns:
            This rank's sum of losses / denominator, a detached scalar without the scale.
        """
        total = torch.zeros((), device=denominator.device)
        if self._sums is not None:
            self._sums.begin(len(microbatches))
        for index, microbatch in enumerate(microbatches):
            with nullcontext() if index == len(microbatches) - 1 else self._no_sync():
                loss = self._loss_sum(microbatch) / denominator
                (loss if scale is None else loss * scale).backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach()
        if self._sums is not None:
            self._sums.finish()  # before anything else changes a gradient
        return total

    def idle_share(self) -> None:
        return None
