"""Rows of files that may be larger than memory: reading in chunks, and writing of the predictions for them."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.base.errors import DataError, UsageError
from trainer.data.formats.base import Row, reason, require_bounded
from trainer.data.formats.table import READERS, Format

OUTPUT_FORMATS: dict[str, Format] = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
INPUT_FORMATS: dict[str, Format] = {**OUTPUT_FORMATS, **dict.fromkeys(READERS["conll"].endings, "conll")}
"""The formats by the ending of a file."""


def row_format(path: Path, key: str, formats: Mapping[str, Format]) -> Format:
    """Return the format of a file by its ending.

    Raises:
        UsageError: the ending is unknown.
    """
    found = formats.get(path.suffix.lower())
    if found is None:
        raise UsageError(f"`{key}` must end with {', '.join(formats)}, but is {path.name}; rename or convert it")
    return found


def read_chunks(
    path: Path, file_format: Format, num_rows: int, skip: int, where: str, keeps_errors: bool = False
) -> Iterator[list[Row | DataError]]:
    """Yield lists of at most `num_rows` rows; the values of a CSV file are texts.

    Args:
        skip: the number of first rows to leave out.
        keeps_errors: whether the error of a line takes the place of its row, and is not raised.

    Raises:
        DataError: the file cannot be read; the message names the line or the row.
    """
    require_bounded(READERS[file_format], path, where)
    rows = READERS[file_format].rows(path, where)
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


def json_line(row: Row) -> str:
    """Return a row as a line; values that JSON lacks, such as dates, become texts."""
    return json.dumps(row, ensure_ascii=False, default=str) + "\n"


def write_rows(parts: Sequence[Path], path: Path, file_format: Format) -> None:
    """Write the rows of JSON Lines files into one file.

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
