"""Rows of files that may be larger than memory: reading in chunks, and writing of the predictions for them."""

from __future__ import annotations

import csv
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from trainer.base.errors import DataError, UsageError
from trainer.data.conll import CONLL_ENDINGS, conll_rows
from trainer.data.readers import TextOptions, delimiter_of, open_text, reason

Row: TypeAlias = dict[str, Any]
RowFormat = Literal["json", "csv", "parquet", "conll"]

OUTPUT_FORMATS: dict[str, RowFormat] = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
_MOST_LEVELS = 100
_JOINED = "a quotation mark in its text opens a value that joins rows; write the rows as JSON Lines"
INPUT_FORMATS: dict[str, RowFormat] = {**OUTPUT_FORMATS, **dict.fromkeys(CONLL_ENDINGS, "conll")}
"""The formats by the ending of a file."""


def row_format(path: Path, key: str, formats: Mapping[str, RowFormat]) -> RowFormat:
    """Return the format of a file by its ending.

    Raises:
        UsageError: the ending is unknown.
    """
    found = formats.get(path.suffix.lower())
    if found is None:
        raise UsageError(f"`{key}` must end with {', '.join(formats)}, but is {path.name}; rename or convert it")
    return found


def read_chunks(
    path: Path, file_format: RowFormat, num_rows: int, skip: int, where: str, keeps_errors: bool = False
) -> Iterator[list[Row | DataError]]:
    """Yield lists of at most `num_rows` rows; the values of a CSV file are texts.

    Args:
        path: the file.
        file_format: its format.
        num_rows: the number of rows of a chunk.
        skip: the number of first rows to leave out.
        where: the name of the file in messages.
        keeps_errors: whether the error of a line takes the place of its row, and is not raised.

    Raises:
        DataError: the file cannot be read; the message names the line or the row.
    """
    readers = {"json": _json_rows, "csv": _csv_rows, "parquet": _parquet_rows, "conll": _conll_rows}
    rows = iter(readers[file_format](path, where))
    try:
        for _ in itertools.islice(rows, skip):
            pass
        while chunk := list(itertools.islice(rows, num_rows)):
            bad = next((row for row in chunk if isinstance(row, DataError)), None)
            if bad is not None and not keeps_errors:
                raise bad
            yield chunk
    except UnicodeError as error:
        raise DataError(f"{where} must be text in UTF-8, but is not: {reason(error)}; save it as UTF-8") from error
    except (OSError, csv.Error, EOFError) as error:
        raise DataError(f"{where} must hold {file_format}, but cannot be read: {reason(error)}") from error


def _json_rows(path: Path, where: str) -> Iterator[Row | DataError]:
    with open_text(path, "utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                yield DataError(
                    f"line {number} of {where} must be a JSON object, but is not JSON: {error.msg} at column"
                    f" {error.colno}; write one object on each line"
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
            elif line.count("[") + line.count("{") > _MOST_LEVELS and _is_deep(value):
                value = _too_much(number, where)
            elif "\\ud" in line.lower() and not _is_text(value):
                value = DataError(
                    f"line {number} of {where} must hold Unicode characters, but has half of a surrogate pair; mend it"
                )
            yield value


def _too_much(number: int, where: str) -> DataError:
    return DataError(
        f"line {number} of {where} must have at most {_MOST_LEVELS} levels of lists and objects, and"
        f" {sys.get_int_max_str_digits()} digits in a number, but has more; shorten it"
    )


def _is_text(value: Any) -> bool:
    """Return whether UTF-8 can encode all texts in a value."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_deep(value: Any) -> bool:
    """Return whether a value has too many levels. Python may read more, but not write them in deeper calls."""
    level = [value]
    for _ in range(_MOST_LEVELS):
        inner = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, list | dict))
        level = list(itertools.chain.from_iterable(inner))
    return any(isinstance(one, list | dict) for one in level)


def _csv_rows(path: Path, where: str) -> Iterator[Row | DataError]:
    with open_text(path, "utf-8-sig") as file:
        delimiter = delimiter_of(path, TextOptions("utf-8-sig"))
        lines = csv.reader(file, delimiter=delimiter)
        names = next((cells for cells in lines if cells), [])
        if len(set(names)) < len(names):
            raise DataError(f"the columns of {where} must have different names, but are {', '.join(names)}; rename one")
        for number, cells in enumerate(_with_empty_rows(lines) if len(names) == 1 else filter(None, lines), start=1):
            short = len(cells) != len(names)
            problem = f"row {number} of {where} must have as many values as there are columns; correct it"
            if not short and delimiter == "\t" and any("\t" in text and "\n" in text for text in cells):
                problem = f"row {number} of {where} must have one line, but {_JOINED}"
                short = True
            yield DataError(problem) if short else dict(zip(names, cells, strict=True))


def _with_empty_rows(lines: Iterable[list[str]]) -> Iterator[list[str]]:
    """Yield the rows of one column, where an empty line is an empty text, except at the end of the file."""
    num_empty = 0
    for cells in lines:
        if cells:
            yield from [[""]] * num_empty
            yield cells
        num_empty = 0 if cells else num_empty + 1


def _conll_rows(path: Path, where: str) -> Iterator[Row]:
    with open_text(path, "utf-8-sig") as file:
        yield from conll_rows(file, where)


def _parquet_rows(path: Path, where: str) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(1000):
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{where} must hold parquet, but cannot be read: {reason(error)}") from error


def json_line(row: Row) -> str:
    """Return a row as a line; values that JSON lacks, such as dates, become texts."""
    return json.dumps(row, ensure_ascii=False, default=str) + "\n"


def write_rows(parts: Sequence[Path], path: Path, file_format: RowFormat) -> None:
    """Write the rows of JSON Lines files into one file.

    Args:
        parts: the files, in order.
        path: the new file.
        file_format: its format.

    Raises:
        DataError: a column holds values of several types, which Parquet lacks.
        OSError: the file cannot be written.
    """
    if file_format == "json":
        with path.open("wb") as file:
            for part in parts:
                file.write(part.read_bytes())
    elif file_format == "csv":
        columns = list(dict.fromkeys(column for part in parts for row in _lines(part) for column in row))
        with path.open("w", encoding="utf-8", newline="") as text:
            delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
            writer = csv.DictWriter(text, columns, delimiter=delimiter, restval="")
            writer.writeheader()
            for part in parts:
                writer.writerows({key: _cell(value) for key, value in row.items()} for row in _lines(part))
    else:
        _write_parquet(parts, path)


def _write_parquet(parts: Sequence[Path], path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    try:
        tables = (pyarrow.Table.from_pylist(list(_lines(part))).schema for part in parts)
        schema = pyarrow.unify_schemas(list(tables), promote_options="permissive")
        with pyarrow.parquet.ParquetWriter(path, schema) as writer:
            for part in parts:
                writer.write_table(pyarrow.Table.from_pylist(list(_lines(part)), schema=schema))
    except pyarrow.ArrowException as error:
        raise DataError(
            f"`--output` is Parquet, which needs one type for each column, but the rows have several: {reason(error)};"
            " write JSON Lines, or leave the columns of the input out with --keep none"
        ) from error


def _lines(part: Path) -> Iterable[Row]:
    with part.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return value if plain else json.dumps(value, ensure_ascii=False)
