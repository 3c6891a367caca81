"""Samples of the steps of a run: which steps are measured, and the numbers of their records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch._C._autograd import _profiler_enabled

from trainer.observe.meter import Meter
from trainer.observe.records import SAMPLING, STEP, StepRecord
from trainer.training.assembly import Assembly
from trainer.training.run_tool import Elapsed, RunTool

LEAST_STEPS = 200
"""Steps of a start before its first sample; the next ones follow after twice as many, and so on."""

_STEPS = 2  # of a sample
SHORTEST_SECONDS = {"cpu": 15.0, "cuda": 200.0}
"""Seconds of the shortest training that is sampled, because the profiler of CUDA needs seconds to start."""


class SampledSteps(RunTool):
    """The samples of a run's steps, in its records."""

    _sampler: Sampler | None = None

    def begin(self, parts: Assembly, meter: Meter, saves: bool) -> None:
        device, self._engine = parts.mesh.device.type, parts.engine
        if saves and obstacle(parts.recipe.model_dump(mode="json"), device) is None:
            self._sampler = Sampler(meter, device)

    def around_step(self) -> AbstractContextManager[object]:
        if self._sampler is None or self._engine.is_captured:  # the profiler can break a captured graph
            return nullcontext()
        return self._sampler.sampled()

    def seconds(self) -> tuple[float, ...]:
        return self._sampler.take() if self._sampler is not None else ()

    def completed(self, record: StepRecord, ranks: Sequence[Sequence[float]], elapsed: Elapsed) -> StepRecord:
        if self._sampler is None:
            return record
        self._sampler.plan(elapsed)
        if not any(map(sum, ranks)):
            return record
        # Here, because most runs have no sample.
        from trainer.tools.step_profile import combined

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
        from trainer.tools.step_profile import StepProfile

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
    if recipe.get("cuda_graphs") is True:
        return "`cuda_graphs` is true, and the profiler can break a captured graph"
    if recipe.get("compile") and device == "cpu":
        return "`compile` is true, and the profiler does not see the operations of compiled code on a CPU"
    return None
