"""`metrics.jsonl`: every number of a run with full precision, for the comparison of runs.

Each line is one JSON object of one of these kinds:

- `{"run": ...}` at each start and resumption;
- a training line at each logging interval: the fields of `StepRecord` that are not None;
- `{"step": ..., "eval": ...}` after each evaluation, with the `picture` of tasks that have one;
- `{"step": ..., "logged": ...}` for the numbers that callbacks log, by their names;
- `{"step": ..., "bad_step": ...}` for each step that was not taken because it was not finite;
- `{"step": ..., "end": ...}` at the end of each start: the outcome, its message, and the idle shares of pipeline ranks.

Floats have the shortest form that reads back as the same float64. Non-finite numbers are the strings "NaN", "Infinity"
and "-Infinity", as in protocol buffers' JSON mapping, so every line is valid JSON.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from trainer.base.disk import read_plain, replace_text
from trainer.base.errors import TrainerError, UsageError, storage_error
from trainer.base.text import masked
from trainer.observe.observer import Observer
from trainer.observe.records import BadStepRecord, EndRecord, EvaluationRecord, LoggedRecord, RunInfo, StepRecord

METRICS_FILE_NAME = "metrics.jsonl"

_NON_FINITE = ("NaN", "Infinity", "-Infinity")


def encode_number(value: float) -> float | str:
    """Return a finite number unchanged, and others by their names in protocol buffers' JSON mapping."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def decode_number(value: Any) -> Any:
    """Return the argument of the `encode_number` call that returned `value`."""
    return float(value) if value in _NON_FINITE else value


def encode_numbers(numbers: Mapping[str, float]) -> dict[str, float | str]:
    """Return the numbers as `encode_number` does."""
    return {name: encode_number(value) for name, value in numbers.items()}


def _decoded(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: decode_number(value) for name, value in values.items()}


class GrowingFile:
    """A text file of whole lines; `add` passes each line to the operating system before it returns.

    Args:
        path: the path of the file; its folder is created.
        lines: returns the first lines, without line breaks. They replace the old content atomically: a kill leaves the
            old file or the new file.

    Raises:
        UsageError: the folder cannot be written.
        TrainerError: the disk is full. Errors of `lines` are passed on.
    """

    def __init__(self, path: Path, lines: Callable[[], Iterable[str]]) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, "".join(f"{line}\n" for line in lines()))
            # No buffer: when the file is closed, a failed write would be repeated, and would fail again.
            self._file: FileIO = path.open("ab", buffering=0)
        except OSError as error:
            raise storage_error(
                f"`checkpoint.folder` must be a folder that can be written, but `{path}` cannot be"
                f" ({error.strerror}); make room or choose another",
                error,
            ) from error

    def add(self, line: str) -> None:
        """Write one line.

        Raises:
            TrainerError: the disk is full, or the folder was deleted.
        """
        rest = memoryview(f"{line}\n".encode())
        try:
            while rest:  # a nearly full disk accepts only a part
                rest = rest[self._file.write(rest) :]
            self._path.stat()  # writes to a deleted file succeed
        except OSError as error:
            raise TrainerError(
                f"{self._path} can no longer be written ({error.strerror}); make room or restore the folder, then start"
                " the run again"
            ) from error

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._file.close()


def step_line(record: StepRecord) -> dict[str, float | str]:
    """Return a training line, without MFU: it is `tokens_per_second` times constants, and often unknown."""
    values = record.numbers()
    del values["mfu"]
    return encode_numbers({name: value for name, value in values.items() if value is not None})


def _parsed_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line as text and as object, without an incomplete last line.

    Raises:
        UsageError: another line is not one that `MetricsFile` writes.
    """
    lines = [line for line in read_plain(path).decode(errors="replace").split("\n") if line]
    for number, line in enumerate(lines, start=1):
        try:
            parsed = json.loads(line)
        except (ValueError, RecursionError):
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
    """The content of a `metrics.jsonl`, in the order of its lines."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    bad_steps: list[BadStepRecord] = field(default_factory=list)
    logged: list[LoggedRecord] = field(default_factory=list)
    end: Mapping[str, Any] | None = None  # of the last start; None: it runs, was killed, or has an earlier version


def read_metrics(path: Path) -> Metrics:
    """Read a `metrics.jsonl`, even while a run writes it. Secrets in addresses are masked.

    Raises:
        UsageError: a line is not one that `MetricsFile` writes.
        OSError: the file does not exist.
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
        metrics.runs.append(masked(line["run"]))  # an earlier version could save an address with a password
        metrics.end = None
    elif "end" in line:
        metrics.end = masked(dict(line["end"]))
    elif "eval" in line:
        metrics.evaluations.append(EvaluationRecord(line["step"], _decoded(line["eval"]), line.get("picture")))
    elif "logged" in line:
        metrics.logged.append(LoggedRecord(line["step"], _decoded(line["logged"])))
    elif "bad_step" in line:
        values: dict[str, Any] = {
            name: tuple(v) if isinstance(v, list) else decode_number(v) for name, v in line["bad_step"].items()
        }
        metrics.bad_steps.append(BadStepRecord(line["step"], **values))
    else:
        ranks = tuple(line.pop("rank_memory_bytes", ()))
        metrics.steps.append(StepRecord(**_decoded(line), rank_memory_bytes=ranks))  # type: ignore[arg-type]


class MetricsFile(Observer):
    """Observer that appends to `metrics.jsonl` in the run's folder.

    Each line leaves the process before training continues. Every write raises `TrainerError` if the disk is full or the
    folder was deleted.

    A resumed run repeats every step after its checkpoint, so the old lines of these steps are dropped first. A run from
    the start begins a new file.
    """

    def __init__(self) -> None:
        self._file: GrowingFile | None = None

    def start(self, run: RunInfo) -> None:
        """Open the file.

        Raises:
            UsageError: the folder cannot be written, or the file to resume is not a metrics file.
        """
        path = run.folder / METRICS_FILE_NAME
        self._file = GrowingFile(path, lambda: _kept_lines(path, run.resumed_from))
        self._write({"run": asdict(run)})

    def step(self, record: StepRecord) -> None:
        ranks = {"rank_memory_bytes": record.rank_memory_bytes} if record.rank_memory_bytes else {}
        self._write({**step_line(record), **ranks})

    def evaluation(self, record: EvaluationRecord) -> None:
        picture = {} if record.picture is None else {"picture": record.picture}
        self._write({"step": record.step, "eval": encode_numbers(record.metrics), **picture})

    def logged(self, record: LoggedRecord) -> None:
        self._write({"step": record.step, "logged": encode_numbers(record.numbers)})

    def bad_step(self, record: BadStepRecord) -> None:
        numbers = {"loss": encode_number(record.loss), "grad_norm": encode_number(record.grad_norm)}
        self._write({"step": record.step, "bad_step": {**numbers, "ranks": record.ranks, "rows": record.rows}})

    def end(self, record: EndRecord) -> None:
        if self._file is None:  # it never started
            return
        if record.outcome == "failed":
            with suppress(TrainerError):  # a full disk may be the failure itself, and must not hide it
                self._write_end(record)
        else:
            self._write_end(record)

    def _write_end(self, record: EndRecord) -> None:
        idle = None if record.pipeline is None else record.pipeline.measured
        values = {"outcome": record.outcome, "exit_code": record.exit_code, "message": record.message, "idle": idle}
        compilation = {} if record.compilation is None else {"compilation": asdict(record.compilation)}
        self._write({"step": record.step, "end": {**values, **compilation, "seconds": record.seconds}})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: Mapping[str, Any]) -> None:
        assert self._file is not None, "a run starts before it is observed"
        self._file.add(json.dumps(line, allow_nan=False, default=os.fspath))


def _kept_lines(path: Path, resumed_from: int | None) -> list[str]:
    """Return the lines of earlier parts of the run that stay valid: `run` lines, and steps up to `resumed_from`."""
    if resumed_from is None or not os.path.lexists(path):
        return []
    return [line for line, parsed in _parsed_lines(path) if "run" in parsed or parsed["step"] <= resumed_from]
