"""`metrics.jsonl`: every number of a run with full precision, for the comparison of runs.

Each line is one JSON object of one of these kinds:

- `{"run": ...}` at each start and resumption; readers leave out lines before it of steps after `resumed_from`, and all
  lines before it if that is null;
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
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from io import FileIO
from pathlib import Path
from typing import Any

from trainer.base.disk import open_plain, replace_text
from trainer.base.errors import TrainerError, UsageError, storage_error
from trainer.observe.observer import Observer
from trainer.observe.records import BadStepRecord, EndRecord, EvaluationRecord, LoggedRecord, RunInfo, StepRecord

METRICS_FILE_NAME = "metrics.jsonl"
STAGE_FILE_NAME = "stage.json"  # beside it in the folder of each of several trainings of a recipe

_NON_FINITE = ("NaN", "Infinity", "-Infinity")
_MOST_DIGITS = 20  # of an integer; a longer one exceeds the range of floats in time


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


@contextmanager
def written(place: Path) -> Iterator[None]:
    """Write files of a run inside this context; `place` names one of them, or their folder, in an error.

    Raises:
        UsageError: the folder cannot be written.
        TrainerError: the disk is full.
    """
    try:
        yield
    except OSError as error:
        raise storage_error(
            f"`checkpoint.folder` must be a folder that can be written, but `{error.filename2 or place}` cannot be"
            f" ({error.strerror}); make room or choose another",
            error,
        ) from error


class GrowingFile:
    """A text file of whole lines; `add` passes each line to the operating system before it returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # No buffer: when the file is closed, a failed write would be repeated, and would fail again.
        self._file: FileIO = path.open("ab", buffering=0)

    def add(self, line: str) -> None:
        """Write one line.

        Raises:
            TrainerError: the disk is full, or the folder was deleted.
        """
        rest = memoryview(f"{line}\n".encode())
        with self._writing():
            while rest:  # a nearly full disk accepts only a part
                rest = rest[self._file.write(rest) :]
            self._path.stat()  # writes to a deleted file succeed

    def store(self) -> None:
        """Wait until the disk has stored all lines.

        Raises:
            TrainerError: the disk failed.
        """
        with self._writing():
            os.fsync(self._file.fileno())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
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
    values = replace(record, more={}).numbers()
    del values["mfu"]
    return encode_numbers({name: value for name, value in values.items() if value is not None})


def run_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line of the last run in a file as text and as object, without an incomplete last line.

    A file may be larger than memory. If someone has joined files, it may hold earlier runs, and steps that later parts
    of a run repeat.
    """
    cut: UsageError | None = None  # the error of a line that is no JSON, unless it is the last one
    with open(open_plain(path, os.O_RDONLY), "rb") as file:
        earlier, place, offset = 0, 0, 0  # lines before the last run, its first byte, and that of each line
        resumed: dict[int, int] = {}  # the steps from which it was resumed, by their lines
        for index, content in enumerate(file):
            # By a pattern, since parsing each line of a long file twice would take too long.
            if match := _RUN.match(content):
                if match[1] == b"null":
                    earlier, place = index, offset
                    resumed.clear()
                else:
                    resumed[index + 1] = int(match[1])
            offset += len(content)
        last, lasts = math.inf, dict[int, float]()  # the last step that no later part repeats, by the line of each part
        # From the last part back: a line counts only up to the earliest step from which a later part resumed.
        for number in reversed(resumed):
            lasts[number], last = last, min(last, resumed[number])
        file.seek(place)
        for number, line in enumerate((raw.decode(errors="replace").rstrip("\n") for raw in file), earlier + 1):
            if not line:
                continue
            # A kill can cut the last line only.
            if cut is not None:
                raise cut
            error = UsageError(
                f"line {number} of `{path}` must be an object that holds `run` or `step`, but is {line[:60]!r};"
                " correct or delete the line"
            )
            try:
                parsed = json.loads(line, parse_int=_integer)
            except (ValueError, RecursionError):
                cut = error
                continue
            if not isinstance(parsed, dict) or not ("run" in parsed or type(parsed.get("step")) is int):
                raise error
            last = lasts.get(number, last)
            if "run" in parsed or parsed["step"] <= last:
                yield line, parsed


_RUN = re.compile(rb'\{"run": \{.*"resumed_from": (null|\d{1,19})')  # a line that `MetricsFile` writes


def _integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError("a number of a run has fewer digits")
    return int(text)


def finite_numbers(values: Any) -> dict[str, Any]:
    """Return finite numbers by their names; an error if they are something else."""
    if not isinstance(values, dict) or not all(math.isfinite(decoded_number(value)) for value in values.values()):
        raise ValueError
    return values


def decoded_number(value: Any) -> Any:
    """Return the argument of the `encode_number` call that returned `value`; an error if it is no number."""
    decoded = decode_number(value)
    if type(decoded) not in (int, float):
        raise TypeError
    return decoded


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
        path, lost = run.folder / METRICS_FILE_NAME, Counter[str]()
        with written(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            # The kept lines form a new file, so a kill meanwhile leaves the old one.
            replace_text(path, (f"{line}\n" for line in _kept_lines(path, run.resumed_from, lost)))
            self._file = GrowingFile(path)
        self._write({"run": asdict(replace(run, lost_seconds=lost.total()))})

    def step(self, record: StepRecord) -> None:
        more: dict[str, Any] = {
            "rank_memory_bytes": record.rank_memory_bytes,
            "seconds": record.seconds,
            "mfu": record.mfu,
            "more": encode_numbers(record.more),
        }
        more["sample"] = record.sample and asdict(record.sample)
        self._write({**step_line(record), **{name: value for name, value in more.items() if value}})

    def evaluation(self, record: EvaluationRecord) -> None:
        picture = {} if record.picture is None else {"picture": record.picture}
        self._write({"step": record.step, "eval": encode_numbers(record.metrics), **picture})

    def logged(self, record: LoggedRecord) -> None:
        self._write({"step": record.step, "logged": encode_numbers(record.numbers)})

    def bad_step(self, record: BadStepRecord) -> None:
        numbers = {"loss": encode_number(record.loss), "grad_norm": encode_number(record.grad_norm)}
        self._write({"step": record.step, "bad_step": {**numbers, "ranks": record.ranks, "rows": record.rows}})

    def flush(self) -> None:
        if self._file is not None:
            self._file.store()

    def end(self, record: EndRecord) -> None:
        if self._file is None:  # it never started
            return
        values: dict[str, Any] = {name: getattr(record, name) for name in ("outcome", "exit_code", "message")}
        values["idle"] = None if record.pipeline is None else record.pipeline.measured
        values |= {"warnings": record.warnings} if record.warnings else {}
        values |= {} if record.compilation is None else {"compilation": asdict(record.compilation)}
        values |= {"parts": record.parts, "seconds": record.seconds}
        # A full disk may be the failure itself, and must not hide it.
        with suppress(TrainerError) if record.outcome == "failed" else nullcontext():
            self._write({"step": record.step, "end": values})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: Mapping[str, Any]) -> None:
        assert self._file is not None, "a run starts before it is observed"
        # `os.fspath` turns paths into texts, and raises an error for any other object.
        self._file.add(json.dumps(line, allow_nan=False, default=os.fspath))


def _kept_lines(path: Path, resumed_from: int | None, lost: Counter[str]) -> Iterator[str]:
    """Yield the lines of earlier parts of the run that stay valid: `run` lines, and steps up to `resumed_from`.

    Add the seconds of the others to `lost`.
    """
    if resumed_from is not None and os.path.lexists(path):
        for line, parsed in run_lines(path):
            if "run" in parsed or parsed["step"] <= resumed_from:
                yield line
            else:
                lost.update(finite_numbers(parsed.get("seconds", {})))
