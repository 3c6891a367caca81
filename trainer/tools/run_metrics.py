"""The metrics of a run as records, read from its `metrics.jsonl`, which anyone may have edited."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Required, get_type_hints

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict  # pydantic needs it below Python 3.12

from trainer.base.errors import UsageError
from trainer.base.text import masked
from trainer.observe.metrics_file import decoded_number, finite_numbers, run_lines
from trainer.observe.records import (
    END,
    RESTARTS,
    START,
    BadStepRecord,
    EvaluationRecord,
    LoggedRecord,
    RunInfo,
    SampledStep,
    StepRecord,
)


@dataclass
class Metrics:
    """The content of a `metrics.jsonl`, in the order of its lines."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    bad_steps: list[BadStepRecord] = field(default_factory=list)
    logged: list[LoggedRecord] = field(default_factory=list)
    end: Mapping[str, Any] | None = None  # of the last start; None: it runs, was killed, or has an earlier version
    stride: int = 1  # `steps` has one of so many training lines, and the last one
    seconds: Counter[str] = field(default_factory=Counter)  # of all starts, by the parts of the wall time
    samples: list[SampledStep] = field(default_factory=list)

    def finish(self, end: Mapping[str, Any], seconds_before: float) -> None:
        """Add the end of a start; `seconds_before` are not of this start."""
        if parts := end.get("parts"):
            self.seconds.update(parts)
            self.seconds.update({END: max(0.0, end.get("seconds", 0.0) - self.seconds.total() + seconds_before)})
        self.end = end

    def thin(self, most_steps: int) -> None:
        """Leave out every second training line if there are more, and the picture of the evaluation before the last."""
        if len(self.steps) > most_steps:
            # The kept lines stay evenly spaced, and `stride` leaves out as many of the later ones.
            del self.steps[1::2]
            self.stride *= 2
        self.evaluations[-2:-1] = [replace(one, picture=None) for one in self.evaluations[-2:-1]]


def read_metrics(path: Path, most_steps: int | None = None) -> Metrics:
    """Read a `metrics.jsonl`, even while a run writes it. Secrets in addresses are masked.

    Args:
        path: the file, which anyone may have edited.
        most_steps: the number of training lines from which every second one is left out, again and again, and the
            pictures of all evaluations but the last; None: keep all.

    Raises:
        UsageError: a line is not one that `MetricsFile` writes.
        OSError: the file does not exist.
    """
    metrics, number, last, before = Metrics(), 0, None, 0.0
    for line, parsed in run_lines(path):
        try:
            record = _record(parsed)
        except (TypeError, KeyError, AttributeError, ValueError):  # pydantic's errors are `ValueError`s
            raise UsageError(
                f"`{path}` must hold the metrics of a run of this version of trainer, but holds {line[:60]!r};"
                " read it with the version that wrote it"
            ) from None
        match record:
            case StepRecord():
                metrics.seconds.update(record.seconds)
                metrics.samples += [record.sample] if record.sample else []
                if number % metrics.stride == 0:
                    metrics.steps.append(record)
                number, last = number + 1, record
            case EvaluationRecord():
                metrics.evaluations.append(record)
            case LoggedRecord():
                metrics.logged.append(record)
            case BadStepRecord():
                metrics.bad_steps.append(record)
            case _ if "run" in parsed:
                # Seconds that are not of this start: those of earlier ones, and of the steps that it repeats.
                before = metrics.seconds.total()
                start, lost = record.get("start_seconds", 0.0), record.get("lost_seconds", 0.0)
                metrics.seconds.update({RESTARTS: start + lost} if metrics.runs else {START: start})
                before += lost
                metrics.runs.append(record)
                metrics.end = None
            case _:
                metrics.finish(record, before)
        if most_steps is not None:
            metrics.thin(most_steps)
    if last is not None and metrics.steps[-1] is not last:
        metrics.steps.append(last)
    return metrics


def _record(line: dict[str, Any]) -> StepRecord | EvaluationRecord | LoggedRecord | BadStepRecord | dict[str, Any]:
    if "run" in line:
        # By way of JSON, because strict validation of Python values refuses lists in place of tuples.
        _START.validate_json(json.dumps(line["run"]), strict=True)
        _require_equal(len(row) or None for row in line["run"].get("ranks", ()))
        return dict(masked(line["run"]))  # an earlier version could save an address with a password
    if "end" in line:
        _END.validate_json(json.dumps(line["end"]), strict=True)
        return {**masked(line["end"]), "step": decoded_number(line["step"])}
    step = line.pop("step")
    if "eval" in line:
        values = _decoded(line["eval"])
        _PICTURE.validate_python(picture := line.get("picture"), strict=True)
        if picture and "confusion" in picture:
            _require_equal(map(len, (picture["classes"], picture["confusion"], *picture["confusion"])))
        if picture and "ece" in picture:
            _require_equal(map(len, picture["ece"].values()))
        if picture:
            _require_equal(map(tuple, picture.get("texts", ())))
        return EvaluationRecord(step, values, picture)
    if "logged" in line:
        return LoggedRecord(step, _decoded(line["logged"]))
    if "bad_step" in line:
        bad = dict(line["bad_step"])
        ranks, rows = (tuple(map(decoded_number, bad.pop(name))) for name in ("ranks", "rows"))
        return BadStepRecord(step, **_decoded(bad), ranks=ranks, rows=rows)
    ranks = tuple(map(decoded_number, line.pop("rank_memory_bytes", ())))
    seconds, sample = finite_numbers(line.pop("seconds", {})), line.pop("sample", None)
    more = _decoded(line.pop("more", {}))
    sampled = None if sample is None else SampledStep(**finite_numbers(sample))
    return StepRecord(step, **_decoded(line), rank_memory_bytes=ranks, seconds=seconds, sample=sampled, more=more)


def _require_equal(values: Iterable[Any]) -> None:
    """Require one value, which is not None, for example the length of all rows of a table."""
    if len(found := set(values)) > 1 or None in found:
        raise ValueError


def _decoded(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: decoded_number(value) for name, value in values.items()}


class _Points(TypedDict):
    """The points of a reliability diagram, one for each bin with rows."""

    rows: Annotated[list[Annotated[int, Field(gt=0)]], Field(min_length=1)]
    confidence: list[float]
    right: list[float]


class _Picture(TypedDict, total=False):
    """The pictures of tasks that a report draws."""

    classes: list[str]
    confusion: list[list[int]]
    ece: _Points
    texts: list[dict[str, Any]]


class _Ending(TypedDict, total=False):
    """The fields of an end that a report shows."""

    outcome: Required[Literal["finished", "stopped", "failed"]]
    message: str | None
    warnings: list[str]
    idle: list[float] | None
    parts: dict[str, float]
    seconds: float


_START: TypeAdapter[Any] = TypeAdapter(TypedDict("_Start", get_type_hints(RunInfo), total=False))  # type: ignore[operator]
_END, _PICTURE = TypeAdapter(_Ending), TypeAdapter(_Picture | None)
