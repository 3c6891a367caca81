"""Forward and backward passes of the microbatches of one step; `graphs.py` and `pipelined.py` have other schedules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from trainer.parallel.gradients import OverlappedSums
from trainer.parallel.microbatch import Microbatch


class Schedule(ABC):
    """Forward and backward of the microbatches of one step, and the sums of gradients over data ranks.

    Args:
        sums: the sums of gradients that the wrapper of the model leaves out; None: there are none.
    """

    def __init__(self, sums: OverlappedSums | None = None) -> None:
        self._sums = sums or OverlappedSums((), None)

    @abstractmethod
    def run(self, microbatches: Sequence[Microbatch], denominator: Tensor, scale: Tensor | None) -> Tensor:
        """Accumulate the gradient of scale * (sum of losses) / denominator.

        Args:
            denominator: the number of valid labels in the global batch, a scalar.
            scale: the loss scale of fp16, a scalar; None: 1.

        Returns:
            This rank's sum of losses / denominator, a detached scalar without the scale.
        """

    def idle_share(self) -> float | None:
        """Return the idle share of the time in `run`; None without a pipeline."""
        return None


class AccumulationSchedule(Schedule):
    """Forward and backward of each microbatch in turn, with gradient sync in the last backward pass only.

    Args:
        loss_sum: returns the sum of losses of a microbatch, a scalar with a graph.
        no_sync: returns a context without gradient sync.
    """

    def __init__(
        self,
        loss_sum: Callable[[Microbatch], Tensor],
        no_sync: Callable[[], AbstractContextManager[None]],
        sums: OverlappedSums | None = None,
    ) -> None:
        super().__init__(sums)
        self._loss_sum = loss_sum
        self._no_sync = no_sync

    def run(self, microbatches: Sequence[Microbatch], denominator: Tensor, scale: Tensor | None) -> Tensor:
        total: Tensor | None = None
        self._sums.begin(len(microbatches))
        for index, microbatch in enumerate(microbatches):
            # The last backward pass sums the gradients of all microbatches over the data ranks, so the passes before it
            # need no collective.
            with nullcontext() if index == len(microbatches) - 1 else self._no_sync():
                # `denominator` counts the whole global batch, so shares of microbatches and ranks are added.
                loss = self._loss_sum(microbatch) / denominator
                (loss if scale is None else loss * scale).backward()  # type: ignore[no-untyped-call]
            # Without `detach`, the total would keep the graphs of all microbatches alive.
            total = loss.detach() if total is None else total + loss.detach()
        self._sums.finish()  # before anything else changes a gradient
        assert total is not None, "a step has a microbatch, perhaps a filler"
        return total
