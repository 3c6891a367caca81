"""`metrics_training.csv` and `metrics_evaluation.csv`: the numbers of `metrics.jsonl` for spreadsheets and data frames.

Training and evaluation rows have different columns and therefore different files. The numbers that callbacks log are in
`metrics_logged.csv`. Numbers are written as in `metrics.jsonl`; unknown values are empty.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

from trainer.base.disk import replacing
from trainer.observe.metrics_file import METRICS_FILE_NAME, GrowingFile, encode_numbers, run_lines, step_line, written
from trainer.observe.observer import Observer
from trainer.observe.records import EvaluationRecord, LoggedRecord, RunInfo, StepRecord

TRAINING_FILE_NAME = "metrics_training.csv"
EVALUATION_FILE_NAME = "metrics_evaluation.csv"
LOGGED_FILE_NAME = "metrics_logged.csv"

_LEFT_OUT = ("mfu", "rank_memory_bytes", "seconds", "sample")
_TRAINING_COLUMNS = tuple(field.name for field in fields(StepRecord) if field.name not in _LEFT_OUT)
Row = Mapping[str, object]


def _line(cells: Iterable[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue().encode(errors="replace").decode()  # anyone may have edited `metrics.jsonl`


def _row_of(line: Mapping[str, Any]) -> tuple[str, Row]:
    """Return the file and the row of a line of `metrics.jsonl`; the name is empty if the line has no row."""
    for key, name in (("eval", EVALUATION_FILE_NAME), ("logged", LOGGED_FILE_NAME)):
        if isinstance(line.get(key), dict):
            return name, {"step": line.get("step", ""), **line[key]}
    if "loss" not in line:
        return "", {}
    return TRAINING_FILE_NAME, {name: line[name] for name in _TRAINING_COLUMNS if name in line}


class _MissingColumnsError(Exception):
    """A later row of a file has other columns than its first line."""


class CsvFiles(Observer):
    """Observer that appends to the files in the run's folder, after `MetricsFile` has written the same numbers.

    A start, and a row with a new column, write the files again from `metrics.jsonl`.

    Every write raises `TrainerError` if the disk is full or the folder was deleted.
    """

    def __init__(self) -> None:
        self._files: dict[str, GrowingFile] = {}
        self._columns: dict[str, dict[str, None]] = {}
        self._folder: Path

    def start(self, run: RunInfo) -> None:
        """Open the files.

        Raises:
            UsageError: the folder or a file in it cannot be written.
        """
        self._folder = run.folder
        self._columns = {TRAINING_FILE_NAME: dict.fromkeys(_TRAINING_COLUMNS), EVALUATION_FILE_NAME: {"step": None}}
        self._write()
        if LOGGED_FILE_NAME not in self._files:  # most runs have none
            with suppress(OSError):
                (run.folder / LOGGED_FILE_NAME).unlink(missing_ok=True)

    def _write(self) -> None:
        self.close()
        with written(self._folder):
            is_written = False
            while not is_written:
                with suppress(_MissingColumnsError):  # now it knows all columns
                    self._write_all()
                    is_written = True
            self._files = {name: GrowingFile(self._folder / name) for name in self._columns}

    def _write_all(self) -> None:
        """Write the files in one reading of `metrics.jsonl`, which may be larger than memory.

        Raises:
            _MissingColumnsError: a later row has other columns than the first one of its file; the old files stay.
        """
        is_complete = True
        with ExitStack() as stack:
            files: dict[str, TextIO] = {}
            headers: dict[str, tuple[str, ...]] = {}

            def begin(name: str) -> None:
                headers[name] = tuple(self._columns[name])
                files[name] = stack.enter_context(replacing(self._folder / name))
                files[name].write(f"{_line(headers[name])}\n")

            for _, line in run_lines(self._folder / METRICS_FILE_NAME):
                name, row = _row_of(line)
                if not name:
                    continue
                self._columns.setdefault(name, {}).update(dict.fromkeys(row))
                if name not in files:
                    begin(name)
                # The reading goes on after a new column, so that the next one knows all columns.
                is_complete &= len(self._columns[name]) == len(headers[name])
                files[name].write(f"{_line(row.get(column, '') for column in headers[name])}\n")
            for name in self._columns.keys() - files.keys():
                begin(name)
            if not is_complete:
                # Inside of `replacing`, so that the old files stay.
                raise _MissingColumnsError

    def _add(self, name: str, row: Row) -> None:
        columns = self._columns.get(name, {})
        if row.keys() <= columns.keys():
            self._files[name].add(_line(row.get(column, "") for column in columns))
        else:
            self._columns.setdefault(name, {}).update(dict.fromkeys(row))
            self._write()  # with this row, which `metrics.jsonl` has

    def step(self, record: StepRecord) -> None:
        self._add(TRAINING_FILE_NAME, step_line(record))

    def evaluation(self, record: EvaluationRecord) -> None:
        self._add(EVALUATION_FILE_NAME, {"step": record.step, **encode_numbers(record.metrics)})

    def logged(self, record: LoggedRecord) -> None:
        self._add(LOGGED_FILE_NAME, {"step": record.step, **encode_numbers(record.numbers)})

    def close(self) -> None:
        for file in self._files.values():
            file.close()
