"""`metrics.jsonl`: every number of a run with full precision, so that two runs can be compared.

One JSON object a line: `{"run": ...}` at each start and resumption, a training line at each logging interval (the
fields of `StepRecord`, without those that are None), `{"step": ..., "eval": ...}` after each evaluation, and
`{"step": ..., "bad_step": ...}` for each step that was not taken because it was not finite. Floats are written in the
shortest form that reads back as the same float64. JSON has no word for what is not finite; here it is the string "NaN",
"Infinity" or "-Infinity", as in protocol buffers' JSON mapping, so that every line is valid JSON.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from trainer.errors import TrainerError, UsageError
from trainer.observe.observer import Observer
from trainer.observe.records import BadStepRecord, EvaluationRecord, RunInfo, StepRecord

METRICS_FILE_NAME = "metrics.jsonl"

_NON_FINITE = ("NaN", "Infinity", "-Infinity")


def _encode_number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _decode_number(value: Any) -> Any:
    return float(value) if value in _NON_FINITE else value


def _step_line(record: StepRecord) -> dict[str, float | str]:
    """MFU stays out: it is `tokens_per_second` times constants, and unknown on many devices."""
    values = asdict(record)
    del values["mfu"]
    return {name: _encode_number(value) for name, value in values.items() if value is not None}


def _parsed_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line as text and as object, without a last line that a kill cut short.

    Raises:
        UsageError: any other line is not one of ours.
    """
    lines = [line for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if line]
    for number, line in enumerate(lines, start=1):
        try:
            parsed = json.loads(line)
        except ValueError:
            parsed = None
        if isinstance(parsed, dict) and ("run" in parsed or isinstance(parsed.get("step"), int)):
            yield line, parsed
        elif parsed is not None or number < len(lines):
            raise UsageError(
                f"line {number} of `{path}` must be an object that holds `run` or `step`, but is {line[:60]!r};"
                " move the file elsewhere"
            )


@dataclass
class Metrics:
    """What a `metrics.jsonl` holds, in the order in which it was written."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    bad_steps: list[BadStepRecord] = field(default_factory=list)


def read_metrics(path: Path) -> Metrics:
    """Reads a `metrics.jsonl`, also one that is still being written.

    Raises:
        UsageError: a line is not one that `MetricsFile` writes.
        OSError: there is no such file.
    """
    metrics = Metrics()
    for line, parsed in _parsed_lines(path):
        try:
            _append(metrics, parsed)
        except (TypeError, KeyError, AttributeError):
            raise UsageError(
                f"`{path}` must hold the metrics of a run of this version of trainer, but holds {line[:60]!r};"
                " read it with the version that wrote it"
            ) from None
    return metrics


def _append(metrics: Metrics, line: dict[str, Any]) -> None:
    if "run" in line:
        metrics.runs.append(line["run"])
    elif "eval" in line:
        values = {name: _decode_number(value) for name, value in line["eval"].items()}
        metrics.evaluations.append(EvaluationRecord(line["step"], values))
    elif "bad_step" in line:
        values = {name: tuple(v) if isinstance(v, list) else _decode_number(v) for name, v in line["bad_step"].items()}
        metrics.bad_steps.append(BadStepRecord(line["step"], **values))
    else:
        metrics.steps.append(StepRecord(**{name: _decode_number(value) for name, value in line.items()}))


class MetricsFile(Observer):
    """Appends to `metrics.jsonl` in the run's folder; each line is out of the process before training goes on.

    Every write may raise a `TrainerError`: the disk is full, or the folder was deleted.

    A resumed run writes every step after its checkpoint again, so those lines of the file are dropped first; a run from
    the start begins a new file.
    """

    def __init__(self) -> None:
        self._file: FileIO | None = None
        self._path = Path(METRICS_FILE_NAME)

    def start(self, run: RunInfo) -> None:
        """Opens the file.

        Raises:
            UsageError: the folder cannot be written, or the file to resume is not a metrics file.
        """
        self._path = path = run.folder / METRICS_FILE_NAME
        try:
            run.folder.mkdir(parents=True, exist_ok=True)
            _replace(path, _kept_lines(path, run.resumed_from))
            # No buffer: what could not be written would be tried again, and fail again, when the file is closed.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise UsageError(
                f"`checkpoint.folder` must be a folder that can be written, but `{run.folder}` is not"
                f" ({error.strerror}); choose another"
            ) from error
        self._write({"run": asdict(run)})

    def step(self, record: StepRecord) -> None:
        self._write(_step_line(record))

    def evaluation(self, record: EvaluationRecord) -> None:
        self._write(
            {"step": record.step, "eval": {name: _encode_number(value) for name, value in record.metrics.items()}}
        )

    def bad_step(self, record: BadStepRecord) -> None:
        numbers = {"loss": _encode_number(record.loss), "grad_norm": _encode_number(record.grad_norm)}
        self._write({"step": record.step, "bad_step": {**numbers, "ranks": record.ranks, "rows": record.rows}})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: Mapping[str, Any]) -> None:
        assert self._file is not None, "a run starts before it is observed"
        rest = memoryview(f"{json.dumps(line, allow_nan=False, default=os.fspath)}\n".encode())
        try:
            while rest:  # a disk that is nearly full takes a part
                rest = rest[self._file.write(rest) :]
            self._path.stat()  # a file that was deleted takes everything
        except OSError as error:
            raise TrainerError(
                f"{self._path} can no longer be written ({error.strerror}); make room or restore the folder, then start"
                " the run again"
            ) from error


def _kept_lines(path: Path, resumed_from: int | None) -> list[str]:
    """The lines of an earlier part of the same run that stay true; an earlier `run` line always does."""
    if resumed_from is None or not path.exists():
        return []
    return [line for line, parsed in _parsed_lines(path) if "run" in parsed or parsed["step"] <= resumed_from]


def _replace(path: Path, lines: list[str]) -> None:
    """Writes the whole file such that a kill at any moment leaves the old one or the new one."""
    new = path.with_suffix(".jsonl.new")
    with new.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
