"""Two steps after the timed ones: one under torch's profiler, one under the planner's ledger of collectives.

Both slow a step down, so neither step is timed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from trainer.base.disk import read_plain, replace_text
from trainer.base.errors import UsageError
from trainer.observe.observer import Observer
from trainer.tools.plan.ledger import Ledger

STEPS = 2
"""The steps that a probe needs."""

PARTS = ("compute", "communication", "rest")
"""The fields of `Shares` that add up to 1."""

_STEP = "trainer.step"
_FILES = "probe-*.json"
_COMPUTES = ("aten::", "trainer::", "deepspeed::")
_COMMUNICATES = ("gloo:", "nccl")

Interval = tuple[float, float]


@dataclass(frozen=True)
class Shares:
    """The parts of a step, which add up to 1, and the bytes of its collectives."""

    compute: float  # the share with a running operation or kernel
    communication: float  # the share in which a collective runs, or waits for another rank, and nothing is computed
    rest: float  # the share of neither: the host's own work, and waiting for rows
    sent_bytes: int  # one rank's input or output of each collective, whichever is larger, summed


_SHARES, _MOST_BYTES = TypeAdapter(Shares), 1 << 16


class Probe(Observer):
    """Observer of one rank that writes the `Shares` of a step.

    `first` is the number of steps before the probed ones.
    """

    def __init__(self, first: int, rank: int, folder: Path) -> None:
        self._begins, self._ends, self._rank, self._folder = first, first, rank, folder
        self._running = ExitStack()
        self._parts: tuple[float, float, float] | None = None

    def doing(self, step: int, what: str) -> None:
        if step < self._ends or step > self._begins + STEPS:
            return
        self._running.close()
        self._ends = step + 1
        if step == self._begins:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            profiler = profile(activities=activities)
            self._running.callback(lambda: self._take(profiler))
            self._running.enter_context(profiler)
            self._running.callback(_synchronise)
            self._running.enter_context(record_function(_STEP))
        elif step == self._begins + 1:
            ledger = Ledger()
            self._running.callback(lambda: self._write(ledger))
            self._running.enter_context(ledger)

    def close(self) -> None:
        self._parts = None  # a step that did not end is not written
        self._running.close()

    def _take(self, profiler: profile) -> None:
        events = profiler.events() or ()  # type: ignore[no-untyped-call]
        (whole,) = (_interval(event) for event in events if event.name == _STEP and event.device_type == DeviceType.CPU)
        device = DeviceType.CUDA if torch.cuda.is_available() else DeviceType.CPU
        own = [event for event in events if event.device_type == device and event.name != _STEP]
        is_kernel = device == DeviceType.CUDA
        communicates = [event for event in own if event.name.startswith(_COMMUNICATES)]
        computes = [
            event
            for event in own
            if (not event.name.startswith(_COMMUNICATES) if is_kernel else event.name.startswith(_COMPUTES))
        ]
        self._parts = parts(whole, map(_interval, computes), map(_interval, communicates))

    def _write(self, ledger: Ledger) -> None:
        if self._parts is not None:
            sent = sum(traffic.num_bytes for traffic in ledger.totals.traffic.values())
            text = json.dumps(asdict(Shares(*self._parts, sent)))
            replace_text(self._folder / _FILES.replace("*", str(self._rank)), text + "\n")


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _interval(event: torch.autograd.profiler_util.FunctionEvent) -> Interval:
    return event.time_range.start, event.time_range.end


def parts(
    whole: Interval, computes: Iterable[Interval], communicates: Iterable[Interval]
) -> tuple[float, float, float]:
    """Return the shares of compute, of communication that nothing hides, and of neither.

    Intervals may overlap and lie inside of each other.
    """
    computing, busy = list(_inside(whole, computes)), list(_inside(whole, communicates))
    compute, either = _length(computing), _length([*computing, *busy])
    length = whole[1] - whole[0]
    return compute / length, (either - compute) / length, 1 - either / length


def _inside(whole: Interval, found: Iterable[Interval]) -> Iterator[Interval]:
    for begin, end in found:
        if begin < whole[1] and end > whole[0]:
            yield max(begin, whole[0]), min(end, whole[1])


def _length(found: Iterable[Interval]) -> float:
    """Return the length of the union of intervals."""
    length, reached = 0.0, float("-inf")
    for begin, end in sorted(found):
        length += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return length


def read_shares(folder: Path) -> Shares | None:
    """Return the mean shares of all ranks and the bytes of the rank that sends most; None if nothing was probed.

    Raises:
        UsageError: a file is not one that a probe writes.
        OSError: a file cannot be read.
    """
    try:
        found = [_SHARES.validate_json(read_plain(file, _MOST_BYTES), strict=True) for file in folder.glob(_FILES)]
        if not all(0 <= value < math.inf for one in found for value in astuple(one)):
            raise ValueError("a share is a finite number")
    except ValueError as error:  # pydantic's errors too
        raise UsageError(f"{folder} must hold the times of a probe, but does not: {error}; remove it") from error
    if not found:
        return None
    mean = {name: sum(getattr(one, name) for one in found) / len(found) for name in PARTS}
    return Shares(**mean, sent_bytes=max(one.sent_bytes for one in found))
