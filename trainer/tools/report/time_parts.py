"""Where the wall time of a run went, from its `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.observe.records import (
    CHECKPOINT,
    COMPILATION,
    DEVICE,
    END,
    EVALUATION,
    OUTPUT,
    RESTARTS,
    ROWS,
    SAMPLING,
    START,
    STEP,
    SampledStep,
    StepRecord,
)
from trainer.tools.run_metrics import Metrics
from trainer.tools.sampling import LEAST_STEPS, SHORTEST_SECONDS, obstacle

COMPUTING, HOST, COMMUNICATION, WAITING, UNDIVIDED = "computing", "host", "communication", "waiting", "steps"
"""The parts of the steps by a sample; without one, steps of several ranks or on a CPU are not divided."""
_SAMPLED = (COMPUTING, HOST, COMMUNICATION, WAITING)

MEANINGS = {
    COMPUTING: "operations of the model and the optimizer",
    UNDIVIDED: "steps, which no sample divides",
    HOST: "the device waits for the host",
    COMMUNICATION: "collectives that no computing hides",
    WAITING: "waiting for rank {slowest}, the slowest",
    ROWS: "waiting for rows",
    COMPILATION: "compilation",
    EVALUATION: "evaluations",
    CHECKPOINT: "waiting for checkpoints",
    OUTPUT: "writing logs",
    SAMPLING: "sampling steps",
    START: "start, until the first step",
    RESTARTS: "later starts, and steps that they repeat",
    END: "the end: export, upload",
}


@dataclass(frozen=True)
class TimeParts:
    """The wall time of a run in parts.

    `largest` is the largest part that is no computing; padding counts as one.
    """

    seconds: Mapping[str, float]  # their sum is the time in which the run had processes
    slowest: int | None  # the rank for which the others wait; None: one rank, or no sample
    padding: float | None  # the share of the positions of texts; None: unknown
    mfu: float | None
    notes: tuple[str, ...]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def padded(self) -> float:
        """The seconds in which padding is computed, if they are proportional to its positions."""
        return (self.padding or 0.0) * (self.seconds.get(COMPUTING, 0.0) or self.seconds.get(UNDIVIDED, 0.0))

    @property
    def largest(self) -> str | None:
        causes = {part: time for part, time in self.seconds.items() if part not in (COMPUTING, UNDIVIDED, SAMPLING)}
        causes["padding"] = self.padded
        return max(causes, key=causes.__getitem__) if any(causes.values()) else None

    @property
    def of_steps(self) -> float:
        """The seconds of the steps, without waiting for rows."""
        return sum(self.seconds.get(part, 0.0) for part in (*_SAMPLED, UNDIVIDED))

    def meaning(self, part: str) -> str:
        """Return the meaning of a part in words."""
        return "padding" if part == "padding" else MEANINGS[part].format(slowest=self.slowest)


def time_parts(metrics: Metrics) -> TimeParts | None:
    """Return the parts of the time of a run; None if an earlier version wrote its metrics, or no step is logged."""
    info: Mapping[str, Any] = metrics.runs[-1] if metrics.runs else {}
    seconds = {part: max(0.0, time) for part, time in metrics.seconds.items() if part in MEANINGS}
    of_steps = {part: max(0.0, metrics.seconds[part]) for part in (STEP, DEVICE)}
    if not sum(of_steps.values()):
        return None
    notes = []
    slowest, several = None, info.get("world_size", 1) > 1
    if samples := metrics.samples:
        seconds |= _divided(sum(of_steps.values()), samples)
        if several:
            slowest = max(samples, key=lambda one: one.waiting).slowest
    else:
        notes.append(f"no step was sampled ({_why_unsampled(info)}), so that the parts of a step are not known")
        if several or info.get("device") == "cpu":
            seconds[UNDIVIDED] = sum(of_steps.values())
        else:
            seconds |= {COMPUTING: of_steps[DEVICE], HOST: of_steps[STEP]}
    if idle := (metrics.end or {}).get("idle"):
        notes.append(
            f"ranks of the pipeline were idle for {', '.join(f'{share:.0%}' for share in idle)} of the steps; this is"
            " part of communication and waiting"
        )
    ordered = {part: seconds[part] for part in MEANINGS if seconds.get(part, 0.0) > 0}
    padding, mfu = _mean(metrics.steps, "padding"), _mean(metrics.steps, "mfu")
    return TimeParts(ordered, slowest, padding, mfu, tuple(notes))


def _divided(seconds: float, samples: Sequence[SampledStep]) -> dict[str, float]:
    """Return the parts of the time of the steps, in the proportions of the samples."""
    sums = {part: sum(getattr(one, part) for one in samples) for part in _SAMPLED}
    whole = sum(sums.values()) or 1.0
    return {part: seconds * time / whole for part, time in sums.items()}


def _why_unsampled(info: Mapping[str, Any]) -> str:
    device = info.get("device", "cpu")
    shortest = SHORTEST_SECONDS["cpu" if device == "cpu" else "cuda"]
    begin = f"it begins after {LEAST_STEPS} steps of a training of {shortest:.0f} seconds or more"
    return obstacle(info.get("recipe") or {}, device) or begin


def _mean(steps: Sequence[StepRecord], name: str) -> float | None:
    """Return the mean of a number over the steps that have it; None without any."""
    known = [value for one in steps if (value := getattr(one, name)) is not None]
    return sum(known) / len(known) if known else None
