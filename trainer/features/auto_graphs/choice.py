"""The choice whether to capture the passes of a run, from the times of its steps.

All ranks choose alike, from numbers that they exchange with each record of a step. Only the device's events are read,
and only those that have passed, so no step waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from trainer.engine.native import NativeEngine
from trainer.parallel.copying import is_busy
from trainer.recipe.graphs_choice import LEAST_HOST_SHARE, auto_obstacle, coarser_padding

if TYPE_CHECKING:
    from trainer.engine.graphs import GraphedSchedule
    from trainer.training.assembly import Assembly

LAST_STEP = 200
"""The step of a start after which nothing is captured: a profiler may sample later steps."""

_WARM_UP = 5  # steps of a start that compile kernels and fill caches
_LEAST_STEPS = 5  # measured ones
_MOST_SHAPES = 8  # of microbatches, before a note on `data.pad_to`
_OLDEST_SECONDS = 1.0  # of a reference: the clocks of host and device drift
_UNKNOWN = -1.0


def _cuda_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class HostShare:
    """The share of a step that the host takes, by the time from its last launch until the device has run it.

    A device that waits for the host runs the last kernel at once. The host's own time would not do: it also waits when
    the queue of launches is full.
    """

    def __init__(
        self,
        is_idle: Callable[[], bool],
        event: Callable[[], Any] = _cuda_event,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._is_idle, self._event, self._clock = is_idle, event, clock
        self._reference: tuple[Any, float] | None = None  # an event that passed at once, and its time on the host
        # The reference, the event at the end, its time on the host and the duration of the last steps.
        self._ends: deque[tuple[tuple[Any, float] | None, Any, float, float]] = deque(maxlen=2 * _LEAST_STEPS)
        self._shares: deque[float] = deque(maxlen=2 * _LEAST_STEPS)
        self._steps = 0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the step inside this context."""
        self._steps += 1
        if self._steps <= _WARM_UP:
            yield
            return
        begin = self._clock()
        if self._is_idle():
            self._reference = self._recorded(), self._clock()
        elif self._reference and begin - self._reference[1] > _OLDEST_SECONDS:
            self._reference = None
        yield
        end = self._clock()
        self._ends.append((self._reference, self._recorded(), end, end - begin))

    def _recorded(self) -> Any:
        event = self._event()
        event.record()
        return event

    def read(self) -> float | None:
        """Return the share, 0 to 1, in the median of the last steps; None before there are enough."""
        for reference, event, at, duration in self._ends:
            if event.query():
                # A device that was busy at the begin of each step never waits for the host.
                self._shares.append(1 - min(1.0, _lag(reference, event, at) / duration) if reference else 0.0)
        self._ends.clear()
        return median(self._shares) if len(self._shares) >= _LEAST_STEPS else None


def _lag(reference: tuple[Any, float], event: Any, at: float) -> float:
    """Return the seconds from the record of an event on the host until the device passed it."""
    passed, begin = reference
    return max(0.0, 1e-3 * float(passed.elapsed_time(event)) - (at - begin))


class Choice:
    """The choice of a run, which is made once: capture the passes, or say why not."""

    def __init__(self, parts: Assembly, host: HostShare | None = None) -> None:
        self._device, self._recipe, self._engine = parts.mesh.device, parts.recipe, parts.engine
        self._host = host or HostShare(lambda: not is_busy(self._device))
        self._obstacle = auto_obstacle(parts.recipe)
        if parts.task.rows_depend:
            self._obstacle = "each loss of this task depends on all rows of the batch"
        self._is_open = True
        self._news: list[str] = []
        self._failure: str | None = None  # of a capture on this rank
        self._knows_failure = False  # whether the user does
        self._schedule: GraphedSchedule | None = None

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the step inside this context until the choice is made."""
        if not self._is_open:
            yield
            return
        with self._host.measured():
            yield

    def vote(self) -> tuple[float, ...]:
        """Return this rank's share of the host, whether its memory is too small, and whether a capture has failed."""
        share = self._host.read() if self._is_open else None
        lacks = share is not None and share >= LEAST_HOST_SHARE and not fits(self._device)
        return (_UNKNOWN if share is None else share, float(lacks), float(self._failure is not None))

    def choose(self, step: int, ranks: Sequence[Sequence[float]], num_steps: int) -> None:
        """Choose by the votes of all ranks after a step, the same on each rank; `num_steps` are those of this start."""
        shares, lacking, failed = zip(*ranks, strict=True)
        if self._is_open and min(shares) > _UNKNOWN:
            # One rank that is late lets all wait in the sums of gradients.
            if max(shares) >= LEAST_HOST_SHARE and num_steps <= LAST_STEP:
                self._is_open = False
                self._capture(step, max(shares), any(lacking))
            elif num_steps >= LAST_STEP:
                self._is_open = False
        if any(failed) and not self._knows_failure:
            self._knows_failure = True
            reason = self._failure or "a capture failed there"
            self._news.append(f"new shapes of rank {failed.index(1.0)} run without CUDA graphs: {reason}")
        self._advise()

    def _capture(self, step: int, share: float, lacks_memory: bool) -> None:
        begin = f"the GPU waits for the host, which takes {share:.0%} of a step"
        obstacle = self._obstacle
        if lacks_memory:
            obstacle = "the memory that is left does not hold a second set of activations"
        if obstacle is None and isinstance(self._engine, NativeEngine) and self._engine.to_graphs is not None:
            self._schedule = self._engine.to_graphs(self._engine, self._fail)
            self._news.append(f"{begin}: passes are captured as CUDA graphs from step {step + 1} on")
        else:
            obstacle = obstacle or "this model has no engine that captures them"
            self._news.append(f"{begin}, but no CUDA graphs are captured ({obstacle})")

    def _fail(self, reason: str) -> None:
        self._failure = reason

    def _advise(self) -> None:
        """Name a coarser padding if microbatches have many shapes.

        It is not chosen here: widths decide the order of sums, so a choice by times would let two runs of a recipe
        differ in their rounding.
        """
        schedule = self._schedule
        if schedule is None or schedule.num_shapes <= _MOST_SHAPES:
            return
        self._schedule = None
        if self._recipe.data.pad_to == 1:
            width = coarser_padding(getattr(self._recipe.data, "max_length", None), schedule.longest, _MOST_SHAPES)
            if width is not None:
                self._news.append(
                    f"microbatches have more than {_MOST_SHAPES} shapes, each with a graph of its own;"
                    f" `data.pad_to={width}` makes at most {_MOST_SHAPES} widths"
                )

    def news(self) -> list[str]:
        """Return the notes since the last call."""
        notes, self._news = self._news, []
        return notes


def fits(device: torch.device) -> bool:
    """Return whether the memory that is left holds activations twice: those of graphs, and those of eager passes."""
    now = torch.cuda.memory_allocated(device)
    free, _ = torch.cuda.mem_get_info(device)
    left = free + torch.cuda.memory_reserved(device) - now
    return left >= 2 * (torch.cuda.max_memory_allocated(device) - now)
