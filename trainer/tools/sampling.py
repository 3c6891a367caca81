"""Samples of steps by torch's profiler: computing, communication that nothing hides, and neither, on each rank.

No clock of another rank is read. The rank that waits least in collectives is the slowest, and the others wait for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch._C._autograd import DeviceType, _profiler_enabled
from torch.autograd.profiler import profile, record_function

from trainer.observe.meter import Meter
from trainer.observe.records import SAMPLING, STEP, SampledStep, StepRecord
from trainer.ranks.environment import variables_set
from trainer.training.assembly import Assembly
from trainer.training.run_tool import Elapsed, RunTool

LEAST_STEPS = 200
"""Steps of a start before its first sample; the next ones follow after twice as many, and so on."""

_STEPS = 2  # of a sample
SHORTEST_SECONDS = {"cpu": 15.0, "cuda": 200.0}
"""Seconds of the shortest training that is sampled, because the profiler of CUDA needs seconds to start."""

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


class SampledSteps(RunTool):
    """The samples of a run's steps, in its records."""

    _sampler: Sampler | None = None

    def begin(self, parts: Assembly, meter: Meter, saves: bool) -> None:
        device = parts.mesh.device.type
        if saves and obstacle(parts.recipe.model_dump(mode="json"), device) is None:
            self._sampler = Sampler(meter, device)

    def around_step(self) -> AbstractContextManager[object]:
        return self._sampler.sampled() if self._sampler is not None else nullcontext()

    def seconds(self) -> tuple[float, ...]:
        return self._sampler.take() if self._sampler is not None else ()

    def completed(self, record: StepRecord, ranks: Sequence[Sequence[float]], elapsed: Elapsed) -> StepRecord:
        if self._sampler is None:
            return record
        self._sampler.plan(elapsed)
        return replace(record, sample=combined(ranks))


class Sampler:
    """Sampler of the steps of a loop; all ranks sample the same steps."""

    def __init__(self, meter: Meter, device: str) -> None:
        self._meter = meter
        self._next = LEAST_STEPS
        self._seconds = SHORTEST_SECONDS[device]
        self._left = 0
        self._sums = [0.0, 0.0, 0.0]
        self._number = 0

    @property
    def is_due(self) -> bool:
        """Whether the next step is sampled."""
        return self._left > 0

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Measure the step inside this context, if it is due."""
        if not self.is_due:
            yield
            return
        self._left -= 1
        if _profiler_enabled():  # by a callback: there is one profiler in a process
            yield
            return
        # The begin and the end of the profiler count as sampling, and the step between them as a step.
        with self._meter.during(SAMPLING), StepProfile() as profiled, self._meter.during(STEP):
            yield
        self._sums = [total + one for total, one in zip(self._sums, profiled.seconds, strict=True)]
        self._number += 1

    def take(self) -> tuple[float, ...]:
        """Return the mean seconds of the parts of the steps that were sampled since the last call, or zeros."""
        means = tuple(total / max(1, self._number) for total in self._sums)
        if not self.is_due:
            self._sums, self._number = [0.0, 0.0, 0.0], 0
            return means
        return (0.0, 0.0, 0.0)  # the sample goes on

    def plan(self, elapsed: Elapsed) -> None:
        """Begin a sample with the next step if there were enough steps and the training is long enough.

        All ranks give the same numbers.
        """
        steps, whole = elapsed.steps, elapsed.seconds * (elapsed.steps + elapsed.left)
        if steps >= self._next and whole >= self._seconds * steps:
            self._left, self._next = _STEPS, 2 * steps


def obstacle(recipe: Mapping[str, Any], device: str) -> str | None:
    """Return the reason for which a run samples no steps; None: there is none.

    Args:
        device: the name of its devices, or "cpu".
    """
    logging = recipe.get("logging")
    if isinstance(logging, Mapping) and logging.get("profile"):  # a file of metrics may hold any value
        return "`logging.profile` has the profiler"
    if recipe.get("cuda_graphs"):
        return "`cuda_graphs` is true, and the profiler can break a captured graph"
    if recipe.get("compile") and device == "cpu":
        return "`compile` is true, and the profiler does not see the operations of compiled code on a CPU"
    return None


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
