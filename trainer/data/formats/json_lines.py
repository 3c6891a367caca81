"""The reader of JSON Lines and JSON."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.base.digests import digest_of, file_digest
from trainer.base.disk import replace_text
from trainer.base.errors import DataError
from trainer.base.text import is_shallow
from trainer.data.formats.base import (
    DAMAGED,
    Files,
    Loaded,
    Reader,
    Row,
    TextOptions,
    chat_features,
    leaves,
    load_with_datasets,
    open_text,
)

if TYPE_CHECKING:
    from datasets import Dataset

HALF_PAIR = "has half of a surrogate pair, which is no character; correct it"
_MOST_LEVELS = 100
_MANY_BRACKETS = 1_000
_LARGE, _DIGITS_SHOWN = 1 << 63, 40


class JsonReader(Reader):
    """JSON Lines, or a file of one list."""

    def load(self, files: Files) -> Loaded:
        given, encoding = files, files.text.encoding
        lists = _require_objects(files)
        if lists:
            paths = [_as_lines(path, encoding) if path in lists else path for path in files.paths]
            files = replace(files, paths=[path for path in paths if path.stat().st_size])
            if not files.paths:
                return None, []
        options = {} if encoding == "utf-8" or len(lists) == len(files.paths) else {"encoding": encoding}
        rows = load_with_datasets("json", files, _load_all, **options)
        if rows is not None and _has_large_numbers(rows) and self.fault(given):
            raise ValueError  # for `fault`
        return rows, []

    def rows(self, path: Path, where: str, text: TextOptions) -> Iterator[Row | DataError]:
        with suppress(ValueError, RecursionError):  # the loop names the fault
            if _is_list(path, text.encoding):
                path, text = _as_lines(path, text.encoding), TextOptions()
        with open_text(path, text.encoding) as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    value = json.loads(line)
                except json.JSONDecodeError as error:
                    yield DataError(
                        f"line {number} of {where} must be a JSON object, but is not JSON: {_position(error)};"
                        " write one object on each line"
                    )
                    continue
                except (ValueError, RecursionError):
                    yield _too_much(number, where)
                    continue
                if not isinstance(value, dict):
                    kind = "a list" if isinstance(value, list) else "another value"
                    value = DataError(
                        f"line {number} of {where} must be a JSON object, but is {kind}; write one object on each line"
                    )
                elif line.count("[") + line.count("{") > _MOST_LEVELS and not is_shallow(value, _MOST_LEVELS + 1):
                    value = _too_much(number, where)
                elif "\\ud" in line.lower() and not is_text(value):
                    value = DataError(f"line {number} of {where} {HALF_PAIR}")
                yield value

    def write(
        self, parts: Sequence[Path], path: Path, source: Path | None = None, escapes_formulas: bool = False
    ) -> None:
        with path.open("wb") as file:
            for part in parts:
                file.write(part.read_bytes())

    def num_empty(self, path: Path, text: TextOptions) -> int:
        with open_text(path, text.encoding) as file:
            return sum(not line.strip() for line in file)

    def first_lines(self, path: Path, text: TextOptions) -> Iterator[int]:
        with open_text(path, text.encoding) as file:
            for number, line in enumerate(file, start=1):
                if row := line.strip("\ufeff \t\r\n"):
                    if not row.startswith("{") or not row.endswith("}"):
                        return  # not JSON Lines
                    yield number

    def fault(self, files: Files) -> str | None:
        """See `Reader`; None if every line is an object or the file is a list, or it cannot be read."""
        for path in files.paths:
            try:
                with open_text(path, files.text.encoding) as file:
                    text = file.read()
            except (UnicodeError, *DAMAGED):
                return None
            lines = [text] if text.lstrip().startswith("[") else text.split("\n")  # a text may hold U+2028
            for number, line in enumerate(lines, start=1):
                try:
                    value = json.loads(line, parse_float=_finite, parse_int=_of_64_bits) if line.strip() else {}
                except json.JSONDecodeError as error:
                    return f"line {number - 1 + error.lineno} of `{path}` is not JSON: {_position(error)}"
                except _LongIntegerError as error:
                    place = f"line {number} of `{path}`" if len(lines) > 1 else f"`{path}`"
                    return f"{place} has the integer {error}, which 64 bits do not hold; write it as a text"
                except (ValueError, RecursionError):
                    place = f"line {number} of `{path}`" if len(lines) > 1 else f"`{path}`"
                    return f"{place} has a number that is too large, or too many levels of lists and objects"
                if not isinstance(value, dict | list):
                    return f"line {number} of `{path}` is not a JSON object"
                if "\\ud" in line.lower() and not is_text(value):
                    place = f"line {number}" if len(lines) > 1 else "a text"
                    return f"{place} of `{path}` {HALF_PAIR}"
        return None


def _too_much(number: int, where: str) -> DataError:
    return DataError(
        f"line {number} of {where} must have at most {_MOST_LEVELS} levels of lists and objects, and"
        f" {sys.get_int_max_str_digits()} digits in a number, but has more; shorten it"
    )


def _position(error: json.JSONDecodeError) -> str:
    """Return the problem and its column; some of the texts of `json` end with "at"."""
    return f"{error.msg.removesuffix(' at')} at column {error.colno}"


def is_text(value: Any) -> bool:
    """Return whether UTF-8 can encode all texts in a value."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _load_all(load: Callable[..., Any]) -> Dataset:
    """Return the rows of JSON files; messages with more than a role and a text keep their own keys and nulls.

    The reader takes the types of columns from the first 10 MB, and refuses later messages with other keys.
    """
    import datasets

    try:
        rows: Dataset = load()
        chats = chat_features(rows.features)
    except datasets.exceptions.DatasetsError:
        # The reader has refused a later message; the first rows tell which columns are chats.
        chats = chat_features(load(streaming=True).features or {}, of_any_keys=True)
        if not chats:
            raise
    if chats:
        rows = load(features=chats)
    # Bytes that are no UTF-8 would fail later, far from the file.
    rows.data.table.validate(full=True)  # the reader does not check the encoding
    return rows


def _is_list(path: Path, encoding: str) -> bool:
    """Return whether the first sign of a file opens a list."""
    with open_text(path, encoding) as file:
        return next((row[0] == "[" for line in file if (row := line.strip("\ufeff \t\r\n"))), False)


def _as_lines(path: Path, encoding: str) -> Path:
    """Return a file of JSON Lines with the rows of a file of one list, in the cache of `datasets`.

    `datasets` would round numbers of a list to 10 digits, and leave out halves of surrogate pairs.

    Raises:
        DataError, OSError, ValueError: the list cannot be read or written.
    """
    import datasets

    written = Path(datasets.config.HF_DATASETS_CACHE) / f"trainer-list-{digest_of([file_digest(path), encoding])}.jsonl"
    if not written.is_file():
        with open_text(path, encoding) as file:
            values = json.loads(file.read().lstrip("\ufeff"))
        # `datasets` names the column of a list of texts in the same way.
        rows = [{"text": value} if isinstance(value, str) else value for value in values]
        written.parent.mkdir(parents=True, exist_ok=True)
        replace_text(written, "".join(json.dumps(row) + "\n" for row in rows), alone=False)
    return written


def _require_objects(files: Files) -> list[Path]:
    """Refuse lines of JSON Lines that end the process of the reader with a fault; return the files of one list.

    The lines are `null` as the first row, and tens of thousands of levels of lists.

    Raises:
        DataError: there is such a line.
    """
    lists = []
    for path in files.paths:
        with open_text(path, files.text.encoding) as file:
            before = "}"
            for number, line in enumerate(itertools.islice(file, files.most_rows), start=1):
                row = line.strip("\ufeff \t\r\n")
                if row.startswith("[") and before == "}":
                    lists.append(path)
                    break
                if row == "null" and before.endswith("}"):
                    raise DataError(
                        f"`{files.key}` must hold json, but line {number} of `{path}` is null, not a JSON object;"
                        " remove the line"
                    )
                # The count costs little, so that only suspicious lines are parsed twice.
                if row.count("[") + row.count("{") > _MANY_BRACKETS and _is_deep(row):
                    raise DataError(
                        f"`{files.key}` must hold json, but line {number} of `{path}` has too many levels of lists and"
                        " objects; write its values as text"
                    )
                before = row or before
    return lists


def _is_deep(text: str) -> bool:
    try:
        json.loads(text)
    except RecursionError:
        return True
    except ValueError:  # the reader names it
        pass
    return False


class _LongIntegerError(ValueError):
    """Error of an integer of more than 64 bits, with its first digits."""


def _of_64_bits(text: str) -> int:
    if not -_LARGE <= (value := int(text)) < _LARGE:
        raise _LongIntegerError(f"{text:.{_DIGITS_SHOWN}}")
    return value


def _has_large_numbers(rows: Dataset) -> bool:
    """Return whether a column has floating-point numbers that the reader may have made of integers."""
    import pyarrow.compute as pc
    from pyarrow import types

    numbers = (leaf for column in rows.data.columns for chunk in column.chunks for leaf in leaves(chunk))
    return any(
        (pc.max(pc.abs(column)).as_py() or 0.0) >= _LARGE for column in numbers if types.is_floating(column.type)
    )


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError
    return value
