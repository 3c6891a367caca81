"""Rows of files that may be larger than memory: reading in chunks, and writing of the predictions for them."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.base.errors import DataError, UsageError
from trainer.base.text import number_in
from trainer.data.formats.base import Row, TextOptions, reason, require_bounded
from trainer.data.formats.table import ENDINGS, Format, reader_of
from trainer.data.readers import is_other, other_encoding

if TYPE_CHECKING:
    import pyarrow

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""Starts of formulas: https://owasp.org/www-community/attacks/CSV_Injection."""

_PLAIN = TextOptions()
OUTPUT_FORMATS: dict[str, Format] = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
INPUT_FORMATS: dict[str, Format] = {**OUTPUT_FORMATS, **dict.fromkeys(ENDINGS["conll"], "conll")}
"""The formats by the ending of a file."""


def row_format(path: Path, key: str, formats: Mapping[str, Format], default: Format | None = None) -> Format:
    """Return the format of a file by its ending, or else the default, which is that of a recipe.

    Raises:
        UsageError: the ending is unknown.
    """
    found = formats.get(path.suffix.lower(), default if default in formats.values() else None)
    if found is None:
        raise UsageError(f"`{key}` must end with {', '.join(formats)}, but is {path.name}; rename or convert it")
    return found


def read_chunks(
    path: Path,
    file_format: Format,
    num_rows: int,
    skip: int,
    where: str,
    keeps_errors: bool = False,
    text: TextOptions = _PLAIN,
) -> Iterator[list[Row | DataError]]:
    """Yield lists of at most `num_rows` rows; the values of a CSV file are texts.

    Args:
        skip: the number of first rows to leave out.
        keeps_errors: whether the error of a line takes the place of its row, and is not raised.
        text: how text files are read.

    Raises:
        DataError: the file cannot be read; the message names the line or the row.
    """
    reader = reader_of(file_format)
    require_bounded(reader, path, where)
    rows = reader.rows(path, where, text)
    try:
        if reader.is_text and is_other(text.encoding, path):
            raise DataError(other_encoding(path, where, text.encoding, "--input"))
        for _ in itertools.islice(rows, skip):
            pass
        while chunk := list(itertools.islice(rows, num_rows)):
            bad = next((row for row in chunk if isinstance(row, DataError)), None)
            if bad is not None and not keeps_errors:
                raise bad
            yield chunk
    except UnicodeError as error:
        raise DataError(other_encoding(path, where, text.encoding, "--input")) from error
    except (OSError, csv.Error, EOFError) as error:
        raise DataError(f"{where} must hold {file_format}, but cannot be read: {reason(error)}") from error


def json_line(row: Row) -> str:
    """Return a row as a line; values that JSON lacks, such as dates, become texts."""
    return json.dumps(row, ensure_ascii=False, default=str) + "\n"


def write_rows(
    parts: Sequence[Path], path: Path, file_format: Format, source: Path | None = None, escapes_formulas: bool = False
) -> None:
    """Write the rows of JSON Lines files into one file.

    Args:
        source: the Parquet file with the rows from which these were made, one for each; columns of both keep its types
            in Parquet. None: there is none.
        escapes_formulas: whether texts that a spreadsheet takes for formulas get an apostrophe in CSV.

    Raises:
        DataError: a column holds values of several types, which Parquet lacks.
        OSError: the file cannot be written.
    """
    if file_format == "json":
        with path.open("wb") as file:
            for part in parts:
                file.write(part.read_bytes())
    elif file_format == "csv":
        _write_csv(parts, path, escaped if escapes_formulas else str)
    else:
        import pyarrow

        try:
            _write_parquet(parts, path, source)
        except (pyarrow.ArrowException, OverflowError) as error:
            raise DataError(
                "`--output` is Parquet, which needs one type for each column, but the rows have several:"
                f" {reason(error)}; write JSON Lines, or leave the columns of the input out with --keep none"
            ) from error


def _write_csv(parts: Sequence[Path], path: Path, shown: Callable[[str], str]) -> None:
    # CSV needs its columns first, so the parts are read twice; rows of an error have other columns.
    columns = list(dict.fromkeys(column for part in parts for row in _lines(part) for column in row))
    with path.open("w", encoding="utf-8", newline="") as text:
        writer = csv.writer(text, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        writer.writerow(map(shown, columns))
        for part in parts:
            for row in _lines(part):
                cells = [_cell(row.get(column)) for column in columns]
                writer.writerow([shown(cell) if isinstance(cell, str) else cell for cell in cells])


def escaped(text: str) -> str:
    """Return a text with an apostrophe before it if a spreadsheet would take it for a formula; a number is none."""
    return f"'{text}" if text.startswith(_FORMULA_STARTS) and number_in(text) is None else text


def _write_parquet(parts: Sequence[Path], path: Path, source: Path | None) -> None:
    import pyarrow
    from pyarrow import parquet

    with ExitStack() as stack:
        file = None if source is None else stack.enter_context(parquet.ParquetFile(source))
        kept = pyarrow.schema([] if file is None else [one for one in file.schema_arrow if not _is_binary(one.type)])
        batches = iter(()) if file is None else file.iter_batches(columns=kept.names)
        # Also read twice: the types of a column must hold for all parts.
        made = _schema([_schema_of(part, kept.names) for part in parts])
        schema, left = pyarrow.schema([*kept, *made]), kept.empty_table()
        writer = stack.enter_context(parquet.ParquetWriter(path, schema))
        for part in parts:
            rows = list(_lines(part))
            while kept.names and len(left) < len(rows):  # batches end with the groups of rows of the file
                batch = pyarrow.Table.from_batches([next(batches)]).select(kept.names)
                left = pyarrow.concat_tables([left, batch])
            columns = [pyarrow.array([row.get(field.name) for row in rows], field.type) for field in made]
            writer.write_table(pyarrow.Table.from_arrays([*left.slice(0, len(rows)).columns, *columns], schema=schema))
            # Rows of the source that belong to the next part.
            left = left.slice(len(rows))


def _schema(schemas: Sequence[pyarrow.Schema]) -> pyarrow.Schema:
    """Return the types that hold the values of all parts."""
    import pyarrow

    large = {field.name for schema in schemas for field in schema if field.type == pyarrow.uint64()}
    alike = [
        pyarrow.schema(
            [
                field.with_type(pyarrow.uint64()) if field.name in large and field.type == pyarrow.int64() else field
                for field in schema
            ]
        )
        for schema in schemas
    ]
    return pyarrow.unify_schemas(alike, promote_options="permissive")


def _schema_of(part: Path, left_out: Sequence[str]) -> pyarrow.Schema:
    """Return the types of the columns of a part; integers that are too large for int64 are uint64."""
    import pyarrow

    rows = list(_lines(part))
    types = {}
    for name in dict.fromkeys(name for row in rows for name in row if name not in left_out):
        values = [row.get(name) for row in rows]
        try:
            types[name] = pyarrow.array(values).type
        except OverflowError:
            types[name] = pyarrow.array(values, pyarrow.uint64()).type
    return pyarrow.schema(types)


def _is_binary(kind: pyarrow.DataType) -> bool:
    """Return whether a type is that of binary values, or of images with their bytes."""
    import pyarrow.types as types

    if types.is_struct(kind):
        return any(field.name == "bytes" and _is_binary(field.type) for field in kind)
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind))


def _lines(part: Path) -> Iterable[Row]:
    with part.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return value if plain else json.dumps(value, ensure_ascii=False)
