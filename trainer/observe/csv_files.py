"""`metrics_training.csv` and `metrics_evaluation.csv`: the numbers of `metrics.jsonl` for spreadsheets and data frames.

Training and evaluation rows have different columns and therefore different files. The numbers that callbacks log are in
`metrics_logged.csv`. Numbers are written as in `metrics.jsonl`; unknown values are empty.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import BinaryIO

from trainer.base.disk import open_plain
from trainer.base.errors import UsageError
from trainer.observe.metrics_file import GrowingFile, encode_numbers, step_line
from trainer.observe.observer import Observer
from trainer.observe.records import EvaluationRecord, LoggedRecord, RunInfo, StepRecord

TRAINING_FILE_NAME = "metrics_training.csv"
EVALUATION_FILE_NAME = "metrics_evaluation.csv"
LOGGED_FILE_NAME = "metrics_logged.csv"

_TRAINING_COLUMNS = tuple(field.name for field in fields(StepRecord) if field.name not in ("mfu", "rank_memory_bytes"))

_LONGEST_LINE = 1 << 20  # bytes; a longer one is no line of these files
_STEP = re.compile(r"[0-9]{1,15}")
Row = Mapping[str, object]


def _line(cells: Iterable[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()


def _whole_lines(file: BinaryIO) -> Iterator[str]:
    for line in iter(partial(file.readline, _LONGEST_LINE), b""):
        if not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
            return
        yield line.decode(errors="replace")


@contextmanager
def _opened(path: Path) -> Iterator[tuple[list[str], Iterator[list[str]]]]:
    """Open a file, which may be larger than memory: its columns, and its rows without an incomplete last line.

    Both are empty if the file is missing.
    """
    if not os.path.lexists(path):
        yield [], iter(())
        return
    with open(open_plain(path, os.O_RDONLY), "rb") as file:
        reader = csv.reader(_whole_lines(file))
        try:
            columns = next(reader, [])
            yield columns, _checked(path, columns, reader)
        except csv.Error as error:
            raise UsageError(f"`{path}` must be a table, but is none ({error}); move the file elsewhere") from error


def _checked(path: Path, columns: Sequence[str], rows: Iterable[list[str]]) -> Iterator[list[str]]:
    for number, row in enumerate(rows, start=2):
        if len(row) != len(columns) or columns[0] != "step" or not _STEP.fullmatch(row[0]):
            raise UsageError(
                f"line {number} of `{path}` must be a row of the columns {', '.join(columns)}, with its step, but is"
                f" not; move the file elsewhere"
            )
        yield row


class _Table:
    """One CSV file, which keeps rows up to step `resumed_from`; None: no rows. A row may add a new column."""

    def __init__(self, path: Path, columns: Sequence[str], resumed_from: int | None) -> None:
        self._path = path
        self._columns = list(columns)
        self._last_step = -1 if resumed_from is None else resumed_from
        self._file = GrowingFile(path, self._kept)

    def add(self, row: Row) -> None:
        if not row.keys() <= set(self._columns):
            self._file.close()
            self._columns += [name for name in row if name not in self._columns]
            self._file = GrowingFile(self._path, self._kept)
        self._last_step = int(str(row["step"]))
        self._file.add(_line(row.get(name, "") for name in self._columns))

    def _kept(self) -> Iterator[str]:
        if self._last_step < 0:
            yield _line(self._columns)
            return
        with _opened(self._path) as (columns, rows):
            new = [name for name in self._columns if name not in columns]
            self._columns = [*columns, *new]
            yield _line(self._columns)
            for row in rows:
                if int(row[0]) <= self._last_step:
                    yield _line([*row, *[""] * len(new)])

    def close(self) -> None:
        self._file.close()


class CsvFiles(Observer):
    """Observer that appends to the files in the run's folder; resumed runs continue them, like `metrics.jsonl`.

    Every write raises `TrainerError` if the disk is full or the folder was deleted.
    """

    def __init__(self) -> None:
        self._tables: dict[str, _Table] = {}
        self._run: RunInfo

    def start(self, run: RunInfo) -> None:
        """Open the files.

        Raises:
            UsageError: the folder cannot be written, or a file to resume is not one that this class writes.
        """
        self._run = run
        self._open(TRAINING_FILE_NAME, _TRAINING_COLUMNS)
        self._open(EVALUATION_FILE_NAME)
        if os.path.lexists(run.folder / LOGGED_FILE_NAME):  # most runs have none
            self._open(LOGGED_FILE_NAME)

    def _open(self, name: str, columns: Sequence[str] = ("step",)) -> None:
        self._tables[name] = _Table(self._run.folder / name, columns, self._run.resumed_from)

    def step(self, record: StepRecord) -> None:
        self._tables[TRAINING_FILE_NAME].add(step_line(record))

    def evaluation(self, record: EvaluationRecord) -> None:
        self._tables[EVALUATION_FILE_NAME].add({"step": record.step, **encode_numbers(record.metrics)})

    def logged(self, record: LoggedRecord) -> None:
        if LOGGED_FILE_NAME not in self._tables:
            self._open(LOGGED_FILE_NAME)
        self._tables[LOGGED_FILE_NAME].add({"step": record.step, **encode_numbers(record.numbers)})

    def close(self) -> None:
        for table in self._tables.values():
            table.close()
