"""Rows of files that may be larger than memory: reading in chunks, and writing of the predictions for them."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.base.errors import DataError, UsageError
from trainer.base.text import number_in
from trainer.data.formats.base import Row, TextOptions, reason, require_bounded
from trainer.data.formats.table import READERS, Format
from trainer.data.readers import is_other, other_encoding

if TYPE_CHECKING:
    from typing import Self

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
    reader = READERS[file_format]
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


@dataclass(frozen=True)
class Writing:
    """How rows are written.

    Attributes:
        source: the Parquet file with the rows from which these were made, one for each; columns of both keep its types
            in Parquet. None: there is none.
        escapes_formulas: whether texts that a spreadsheet takes for formulas get an apostrophe in CSV.
    """

    source: Path | None = None
    escapes_formulas: bool = False


def write_rows(parts: Sequence[Path], path: Path, file_format: Format, writing: Writing = Writing()) -> None:
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
        _write_csv(parts, path, escaped if writing.escapes_formulas else str)
    else:
        _write_parquet(parts, path, writing.source)


def _write_csv(parts: Sequence[Path], path: Path, shown: Callable[[str], str]) -> None:
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
    import pyarrow.parquet

    try:
        with _SourceColumns(source) as kept:
            schema = _schema([_schema_of(part, kept.schema.names) for part in parts])
            with pyarrow.parquet.ParquetWriter(path, pyarrow.schema([*kept.schema, *schema])) as writer:
                for part in parts:
                    rows = list(_lines(part))
                    made = [pyarrow.array([row.get(field.name) for row in rows], field.type) for field in schema]
                    writer.write_table(pyarrow.Table.from_arrays([*kept.take(len(rows)), *made], schema=writer.schema))
    except (pyarrow.ArrowException, OverflowError) as error:
        raise DataError(
            f"`--output` is Parquet, which needs one type for each column, but the rows have several: {reason(error)};"
            " write JSON Lines, or leave the columns of the input out with --keep none"
        ) from error


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


class _SourceColumns:
    """The columns of a Parquet file that are no binary values, in parts of any number of rows; none without a file."""

    def __init__(self, path: Path | None) -> None:
        import pyarrow
        import pyarrow.parquet

        self._file = None if path is None else pyarrow.parquet.ParquetFile(path)
        fields = (
            [] if self._file is None else [field for field in self._file.schema_arrow if not _is_binary(field.type)]
        )
        self.schema = pyarrow.schema(fields)
        self._batches = iter(()) if self._file is None else self._file.iter_batches(columns=self.schema.names)
        self._rest = self.schema.empty_table()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def take(self, num_rows: int) -> list[pyarrow.ChunkedArray]:
        """Return the columns of the next rows."""
        import pyarrow

        while self.schema.names and len(self._rest) < num_rows:
            batch = pyarrow.Table.from_batches([next(self._batches)]).select(self.schema.names)
            self._rest = pyarrow.concat_tables([self._rest, batch])
        taken, self._rest = self._rest.slice(0, num_rows), self._rest.slice(num_rows)
        columns: list[pyarrow.ChunkedArray] = taken.columns
        return columns


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
