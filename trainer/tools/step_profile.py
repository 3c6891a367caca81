"""A step, measured by torch's profiler: computing, communication that nothing hides, and neither, on each rank.

No clock of another rank is read. The rank that waits least in collectives is the slowest, and the others wait for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler import profile, record_function

from trainer.observe.records import SampledStep
from trainer.ranks.environment import variables_set

_RANGE = "trainer.step"
_COMPUTES = ("aten::", "trainer::", "deepspeed::")
_COMMUNICATES = ("gloo:", "nccl")
_QUIET = {"KINETO_LOG_LEVEL": "99"}
_NANOSECOND = 1e-9

Interval = tuple[float, float]


class StepProfile:
    """A context manager that measures the parts of a step on this rank.

    Attributes:
        seconds: after the step, the seconds with a running operation or kernel; those in which a collective runs, or
            waits for another rank, and nothing is computed; and those of neither.
    """

    seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def __init__(self) -> None:
        with _quiet():
            self._profile = profile(use_device="cuda" if torch.cuda.is_available() else None)
        self._range = record_function(_RANGE)

    def __enter__(self) -> StepProfile:
        # Kernels of the step before would count to this one, since the host works ahead of the device.
        _synchronise()
        with _quiet():
            self._profile.__enter__()  # type: ignore[no-untyped-call]
        self._range.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        _synchronise()
        self._range.__exit__(*error)
        self._profile.__exit__(*error)  # type: ignore[no-untyped-call]
        if error[0] is None:
            self.seconds = self._parts()

    def _parts(self) -> tuple[float, float, float]:
        on_gpu = torch.cuda.is_available()
        device = DeviceType.CUDA if on_gpu else DeviceType.CPU
        whole: Interval = (0.0, 0.0)
        computes: list[Interval] = []
        communicates: list[Interval] = []
        found = self._profile.kineto_results  # `events` of the profile builds a tree, which takes seconds
        for event in found.events() if found else ():
            name, is_own = event.name(), event.device_type() == device
            if name == _RANGE:
                if event.device_type() == DeviceType.CPU:
                    whole = event.start_ns(), event.end_ns()
            # The profiler repeats ranges of the host on the GPU, where they cover the gaps between kernels too.
            elif is_own and not (on_gpu and event.is_user_annotation()):
                if name.startswith(_COMMUNICATES):
                    communicates.append((event.start_ns(), event.end_ns()))
                elif on_gpu or name.startswith(_COMPUTES):
                    computes.append((event.start_ns(), event.end_ns()))
        if whole[0] == whole[1]:  # the profiler has lost the range
            return (0.0, 0.0, 0.0)
        length = (whole[1] - whole[0]) * _NANOSECOND
        compute, communication, rest = (length * share for share in parts(whole, computes, communicates))
        return compute, communication, rest


def combined(ranks: Sequence[Sequence[float]]) -> SampledStep | None:
    """Return the sample of all ranks from the parts of each, as of `StepProfile.seconds`; None if there is none."""
    if not any(map(sum, ranks)):
        return None
    # The rank that comes last to a collective waits the least in it.
    slowest = min(range(len(ranks)), key=lambda rank: ranks[rank][1])
    others = [own for rank, own in enumerate(ranks) if rank != slowest] or [ranks[slowest]]
    computing, exposed, host = (sum(one) / len(others) for one in zip(*others, strict=True))
    # The slowest rank waits for no other one, so its seconds are those of the messages alone.
    communication = min(exposed, ranks[slowest][1])
    return SampledStep(computing, host, communication, exposed - communication, slowest)


def _quiet() -> AbstractContextManager[None]:
    """Keep the profiler from writing two lines to standard error, unless the user has set its level."""
    return variables_set({name: level for name, level in _QUIET.items() if name not in os.environ})


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


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
    length, reached = 0.0, float("-inf")
    for begin, end in sorted(found):
        # Of a sorted interval, only the part behind all earlier ends is new.
        length += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return length
