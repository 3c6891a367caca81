"""The result of each trial: times, memory, and the differences of its losses from those of the first trial."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

import torch

from trainer.base.errors import TrainerError
from trainer.observe.records import StepRecord
from trainer.parallel.kernel_support import obstacle
from trainer.recipe.plan import plan_run
from trainer.recipe.schema import Recipe
from trainer.tools.compare.contestants import Kind, kind_of
from trainer.tools.compare.probe import Shares
from trainer.tools.compare.turns import Trial
from trainer.tools.plan.hardware import parse_devices
from trainer.tools.plan.pipeline_plan import plan_steps
from trainer.tools.plan.recipe_plan import plan_recipe, tokens_of, traffic_by_axis
from trainer.tools.tolerances import difference, tolerance

_MOST_WARM_UP = 5


@dataclass(frozen=True)
class Likeness:
    """The differences of a trial from the reference, relative to it."""

    loss: float  # the largest difference of the loss of a step
    grad_norm: float  # that of the gradient norm
    leaves: int | None  # the first step beyond the tolerance; None: all steps are within it


@dataclass(frozen=True)
class PlannedStep:
    """The plan of a step: the peak bytes of tensors and the bytes sent by the heaviest rank; the likely seconds."""

    peak_bytes: int
    sent_bytes: int
    seconds: float | None


@dataclass(frozen=True)
class Result:
    """The numbers of a trial; times are of the steps after the warm-up, over all turns."""

    name: str  # of the contestant
    overrides: tuple[str, ...]
    processes: int
    kind: Kind  # the keys in which it differs from the reference
    is_reference: bool = False  # whether it is the first one that trained
    layout: str | None = None  # its mesh; None if it did not start
    reason: str | None = None  # the cause of its failure; None if it trained
    # the quartiles of the seconds of a step; the second one is the median
    step_seconds: tuple[float, float, float] | None = None
    turn_seconds: tuple[float, ...] = ()  # the median of each turn
    samples_per_second: float | None = None  # of all ranks, the median of the steps
    tokens_per_second: float | None = None  # the same, without padding; None: rows have no tokens
    rank_memory_bytes: tuple[int, ...] = ()  # the peak of each rank
    records: tuple[StepRecord, ...] = ()  # the steps of the first turn
    shares: Shares | None = None  # the parts of a step; None if none was probed
    likeness: Likeness | None = None  # None for the reference, or another training
    plan: PlannedStep | None = None  # None if the step cannot be planned

    @property
    def is_complete(self) -> bool:
        return self.reason is None and bool(self.records)

    def as_object(self) -> dict[str, Any]:
        """Return JSON values; `records` has the loss and the gradient norm of each step."""
        values = asdict(self)
        values["records"] = [
            {"step": record.step, "loss": record.loss, "grad_norm": record.grad_norm} for record in self.records
        ]
        return values


def results(trials: Sequence[Trial]) -> list[Result]:
    """Return the results of trials; the first one that trained is the reference."""
    first = next((trial for trial in trials if trial.turns), trials[0])
    return [_result(trial, first) for trial in trials]


def _result(trial: Trial, first: Trial) -> Result:
    contestant = trial.contestant
    kind: Kind = "layout"
    if trial.resolved is not None and first.resolved is not None:
        kind = kind_of(trial.resolved.recipe, first.resolved.recipe)
    made = Result(contestant.name, contestant.overrides, contestant.processes, kind, reason=trial.reason)
    if not trial.turns:
        return made
    # First steps compile kernels and open connections.
    turns = [turn.steps[warm_up(len(turn.steps)) :] for turn in trial.turns]
    steps = list(chain.from_iterable(turns))
    of_turns = [[step.step_seconds for step in turn] for turn in turns]
    seconds = list(chain.from_iterable(of_turns))
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    tokens = [step.tokens_per_second for step in steps if step.tokens_per_second is not None]
    # The peak of a run only grows, so the last step has it.
    memory = [turn.steps[-1].rank_memory_bytes for turn in trial.turns]
    is_compared = trial is not first and kind != "training"
    return replace(
        made,
        is_reference=trial is first,
        layout=trial.turns[0].runs[-1]["layout"],
        step_seconds=(low, middle, high),
        turn_seconds=tuple(map(statistics.median, of_turns)),
        samples_per_second=statistics.median(step.samples_per_second for step in steps),
        tokens_per_second=statistics.median(tokens) if tokens else None,
        rank_memory_bytes=tuple(map(max, zip(*memory, strict=True))),
        records=tuple(trial.turns[0].steps),
        shares=trial.shares,
        likeness=_likeness(trial, first) if is_compared else None,
    )


def warm_up(steps: int) -> int:
    """Return the first steps of a turn that are not timed: a fifth, at most five."""
    return min(_MOST_WARM_UP, steps // 5 or int(steps > 1))


def _tolerance(recipe: Recipe) -> tuple[float, float]:
    return tolerance((recipe.precision, recipe.parallel.communication.gradients), recipe.optimizer.tolerances)


def _likeness(trial: Trial, first: Trial) -> Likeness:
    """Compare two trials that trained, so both have a recipe."""
    limits = max(_tolerance(one.resolved.recipe) for one in (trial, first) if one.resolved)
    expected = {record.step: record for record in first.turns[0].steps}
    largest = [0.0, 0.0]
    leaves: int | None = None
    for record in (record for turn in trial.turns for record in turn.steps if record.step in expected):
        reference = expected[record.step]
        found = difference(record.loss, reference.loss), difference(record.grad_norm, reference.grad_norm)
        largest = [max(pair) for pair in zip(largest, found, strict=True)]
        if any(value > limit for value, limit in zip(found, limits, strict=True)):
            # Over all turns, the earliest step.
            leaves = min(record.step, leaves or record.step)
    return Likeness(largest[0], largest[1], leaves)


def with_plan(result: Result, trial: Trial, hardware: str | None) -> Result:
    """Return a result with its plan, or unchanged if the step cannot be planned.

    `hardware` is a device or a file as of `trainer plan --gpus`, for the time; None: memory alone.
    """
    if trial.resolved is None:
        return result
    recipe = trial.resolved.recipe
    seconds: float | None = None
    try:
        if hardware is None:
            cuda = torch.cuda.is_available()
            fused = cuda and obstacle(torch.device("cuda")) is None
            steps = plan_steps(plan_run(recipe, result.processes), tokens_of(recipe), cuda, fused)
        else:
            made = plan_recipe(trial.resolved, parse_devices(f"{result.processes}x{hardware}"))
            steps = made.steps
            seconds = None if made.time is None else made.time.likely
    except TrainerError:
        return result
    peak = max(step.peak.num_bytes for step in steps)
    sent = max(sum(count for _, count in traffic_by_axis(step).values()) for step in steps)
    return replace(result, plan=PlannedStep(peak, sent, seconds))
