"""Reader of the folder `rows` of a run: the loss and the margin of each training row at each step that took it.

A file is a line of JSON with the kind of the rows, their fields and the classes, and then records of fixed size. Its
name has the first step of a start of the run; steps from a later start on count from there.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.base.errors import UsageError

FOLDER = "rows"
_FILE = re.compile(r"from-(\d+)-rank-(\d+)\.rows")
_VERSION = 1
_NEEDED = {"step", "place", "loss"}


@dataclass(frozen=True)
class RowRecord:
    """The record of a run.

    Attributes:
        kind: `classes`, `tokens`, `labels` or `losses`.
        classes: the names of the classes; empty without classes.
        records: sorted by step and place, each pair once, with the fields `step`, `place`, `loss` and others.
        notes: notes on damage.
    """

    kind: str
    classes: tuple[str, ...]
    records: NDArray[Any]
    notes: tuple[str, ...] = ()


def read_record(run: Path) -> RowRecord:
    """Return the record of a run's folder.

    Raises:
        UsageError: there is none, or it cannot be read.
    """
    files = {path: name for path in sorted((run / FOLDER).glob("*.rows")) if (name := _FILE.fullmatch(path.name))}
    if not files:
        raise UsageError(
            f"`RUN` must be a run with `logging.rows` true, but {run} has no record of its rows; train it with"
            " logging.rows=true, or name a recipe to audit its data"
        )
    starts = sorted({int(name[1]) for name in files.values()})
    header: dict[str, Any] = {}
    parts, notes = [], []
    for path, name in files.items():
        own, records, rest = _read(path)
        header = header or own
        if own != header:
            raise _damaged(path, "its fields differ from those of other files")
        if rest:
            notes.append(f"the end of {path.name} is incomplete, and not read")
        later = next((start for start in starts if start > int(name[1])), None)
        parts.append(records if later is None else records[records["step"] < later])
    records = np.concatenate(parts)
    order = np.lexsort((records["place"], records["step"]))
    keys = records["step"][order].astype(np.int64) << 32 | records["place"][order]
    records = records[order[np.flatnonzero(np.diff(keys, prepend=-1))]]
    return RowRecord(str(header["kind"]), tuple(map(str, header["classes"])), records, tuple(notes))


def _read(path: Path) -> tuple[dict[str, Any], NDArray[Any], int]:
    """Return the first line of a file, its records, and the number of bytes behind the last whole one."""
    try:
        data = path.read_bytes()
        first, _, body = data.partition(b"\n")
        header = json.loads(first)
        fields = [(str(name), str(kind), *(tuple(shape) for shape in rest)) for name, kind, *rest in header["fields"]]
        dtype = np.dtype(fields)
        is_known = header["version"] == _VERSION and {*(dtype.names or ())} >= _NEEDED and not dtype.hasobject
        if not is_known or not isinstance(header["kind"], str) or not isinstance(header["classes"], list):
            raise ValueError("its first line has other fields")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    number = len(body) // dtype.itemsize
    return header, np.frombuffer(body, dtype, number), len(body) - number * dtype.itemsize


def _damaged(path: Path, problem: str) -> UsageError:
    return UsageError(f"{path} must be a record of rows, but cannot be read: {problem}; remove it, and train again")
