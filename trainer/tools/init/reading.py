"""The rows of the data: their encoding, the sheet of a workbook, and conditions that leave out rows without values."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from trainer.base.errors import Problems, TrainerError
from trainer.base.text import listed
from trainer.data.formats.base import DAMAGED, CellKind, open_bytes, wide_encoding
from trainer.data.formats.table import format_of, reader_of
from trainer.data.sources import load_splits
from trainer.recipe.schema import FileData
from trainer.tools.check import MOST_ROWS
from trainer.tools.init.columns import Column, columns_of
from trainer.tools.init.draft import Draft
from trainer.tools.init.shapes import Shape, names_read, shapes
from trainer.tools.init.sources import data_keys

_SCANNED_BYTES = 64 << 20
_CONTROLS = re.compile(rb"[\x00-\x08\x0e-\x1f]")
_MOST_LETTERS = 0.2
"""The share of letters beyond ASCII above which a text is in no Western language."""
_MOST_TABLES = 20


class Rows(NamedTuple):
    """Rows of the training split, whether they are all, notes on them, and rows of the validation split, if any."""

    train: Any
    is_whole: bool
    notes: Sequence[str]
    validation: Any


def read(draft: Draft, kinds: Mapping[str, CellKind] | None = None) -> Rows:
    """Return rows of the data; set the section `data`.

    `kinds` are those of columns of CSV files that a task reads, if it is known.

    Raises:
        TrainerError: the data cannot be read.
    """
    request = draft.request
    for key, value in data_keys(request.source, Path(os.path.abspath(request.output)).parent).items():
        draft.put(f"data.{key}", value)
    with suppress(*DAMAGED):  # the reader names the damage
        _put_encoding(draft)
        _put_table(draft)
    return _load(draft, kinds)


def _load(draft: Draft, kinds: Mapping[str, CellKind] | None = None) -> Rows:
    request = draft.request
    stub = Draft(replace(request, overrides=tuple(word for word in request.overrides if word.startswith("data."))))
    stub.values.update(
        draft.values, name="stub", task={"type": "causal_lm", "text": "text"}, model={"name_or_path": "a/b"}
    )
    data = stub.resolved().recipe.data  # of a stub, because the task is not known yet
    problems = Problems()
    splits = load_splits(data, most_rows=MOST_ROWS, problems=problems, kinds=kinds)
    if not isinstance(data, FileData) and splits.validation is not None:
        draft.put("data.validation", data.validation)
    elif isinstance(data, FileData) or "data.validation" in request.given:
        problems.raise_all()
    validation = None if splits.validation is None else splits.validation.rows
    return Rows(splits.train.rows, splits.train.is_whole, splits.notes, validation)


def _put_encoding(draft: Draft) -> None:
    """Set the encoding of a text file that is not UTF-8, if its bytes show it."""
    source = draft.request.source
    name = format_of(source) if source.is_file() else None
    if name is None or not reader_of(name).is_text:
        return
    if wide := wide_encoding(source):
        draft.put("data.encoding", wide, "by its first bytes")
    elif word := _western_word(source):
        draft.put("data.encoding", "cp1252", f"a guess, by which a word is {word}; else name another encoding")


def _western_word(source: Path) -> str | None:
    """Return a word with letters beyond ASCII of a file in the encoding of Windows; None: it seems to have another.

    Lines in UTF-8 beside others that are not are a fault of the file, which its reader names.
    """
    word, num_letters, num_others, scanned = None, 0, 0, 0
    with open_bytes(source) as file:
        for line in file:
            if (scanned := scanned + len(line)) > _SCANNED_BYTES:
                break
            if line.isascii():
                num_letters += len(line)
                continue
            try:
                line.decode()
                return None
            except UnicodeDecodeError:
                pass
            try:
                text = line.decode("cp1252")
            except UnicodeDecodeError:
                return None
            if _CONTROLS.search(line):
                return None
            num_letters += len(text)
            num_others += sum(not one.isascii() for one in text)
            word = word or next((one for one in re.findall(r"\w+", text) if not one.isascii()), None)
    return word if num_others <= num_letters * _MOST_LETTERS else None


def _put_table(draft: Draft) -> None:
    """Set the key that names a table of a file with several: the first with labels, or else with texts."""
    source = draft.request.source
    name = format_of(source) if source.is_file() else None
    tables = None if name is None else getattr(reader_of(name), "tables", None)  # of formats with several tables
    key, names = ("", []) if tables is None else tables(source)
    if len(names) < 2 or f"data.{key}" in draft.request.given or key in draft.values["data"]:
        return
    found: list[tuple[bool, int, str]] = []  # whether a table has only texts, its place and its name
    for place, table in enumerate(names[:_MOST_TABLES]):
        tried = Draft(draft.request, {"data": {**draft.values["data"], key: table}})
        with suppress(TrainerError):  # of tables without rows
            if fitting := shapes(columns_of(_load(tried).train, MOST_ROWS), draft.request.given_columns):
                found.append((fitting[0].task.keys() <= {"type", "text"}, place, table))
    table = min(found)[2] if found else names[0]
    others = listed([f"`{other}`" for other in names if other != table], 5)
    draft.put(f"data.{key}", table, f"the first with columns for a task; others: {others}")


def left_out(
    columns: Sequence[Column], shape: Shape, is_whole: bool, validation: Sequence[Column] = ()
) -> tuple[list[str], str, int]:
    """Return conditions that leave out rows without a value that the task reads, the reason, and their number.

    `validation` are the columns of a validation split of its own; the number counts training rows only.
    """
    conditions, reasons, lacking = _lacking(columns, shape)
    number = max((len(column.cells) for column in columns), default=0)
    scope = f"{number:,}" if is_whole else f"the first {number:,}"
    parts = [f"{lacking:,} of {scope} rows: {listed(reasons, 5)}"] if reasons or not validation else []
    others, reasons, number = _lacking(validation, shape)
    if others:
        rows = max(len(column.cells) for column in validation)
        parts.append(f"{number:,} of {rows:,} validation rows: {listed(reasons, 5)}")
    return list(dict.fromkeys((*conditions, *others))), f"leaves out {'; '.join(parts)}", lacking


def _lacking(columns: Sequence[Column], shape: Shape) -> tuple[list[str], list[str], int]:
    """Return conditions, the reason of each column, and the number of rows that lack a value."""
    conditions, reasons, rows = list[str](), list[str](), set[int]()
    for column in names_read(columns, shape):
        lacking = {row: value for row, value in enumerate(column.cells) if _lacks(column, value)}
        if not lacking:
            continue
        rows |= lacking.keys()
        conditions += _conditions(column, lacking.values())
        kinds = ["null"] if any(value is None for value in lacking.values()) else []
        kinds += [json.dumps(text, ensure_ascii=False) if text.strip() else "blank" for text in column.missing]
        kinds += ["NaN"] if any(isinstance(value, float) for value in lacking.values()) else []
        reasons.append(f"`{column.name}` is {' or '.join(dict.fromkeys(kinds))} in {len(lacking):,}")
    return conditions, reasons, len(rows)


def _lacks(column: Column, value: Any) -> bool:
    return value is None or value != value or (isinstance(value, str) and value in column.missing)


def _conditions(column: Column, lacking: Any) -> Iterator[str]:
    # Names with other signs, which a condition might divide, are written as JSON.
    name = column.name if re.fullmatch(r"\w+", column.name) else json.dumps(column.name, ensure_ascii=False)
    values = list(lacking)
    if any(isinstance(value, float) for value in values):
        yield f"{name} < Infinity"  # null is not less either
    elif None in values:
        yield f"{name} != null"
    if column.missing:
        yield f"{name} not in {json.dumps(column.missing, ensure_ascii=False)}"
