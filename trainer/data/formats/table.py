"""The table of formats, with the readers of Parquet, Excel and CoNLL."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from trainer.base.errors import DataError, UsageError
from trainer.base.text import listed
from trainer.data.formats.base import Files, Loaded, Reader, Row, ending, load_with_datasets, open_text, reason
from trainer.data.formats.csv_files import CsvReader
from trainer.data.formats.json_lines import JsonReader
from trainer.data.formats.megatron import MegatronReader

_ROWS_AT_ONCE = 1000
_SHEETS_SHOWN = 5


class ParquetReader(Reader):
    """Parquet."""

    endings = (".parquet",)
    is_text = False

    def load(self, files: Files) -> Loaded:
        return load_with_datasets("parquet", files), []

    def rows(self, path: Path, where: str) -> Iterator[Row | DataError]:
        import pyarrow
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(_ROWS_AT_ONCE):
                    yield from batch.to_pylist()
        except pyarrow.ArrowException as error:
            raise DataError(f"{where} must hold parquet, but cannot be read: {reason(error)}") from error

    def bound_bytes(self, path: Path) -> float:
        """See `Reader`: each value of a column may be the longest one of the dictionaries."""
        bound = 0.0
        with _with_dictionaries(path) as file:
            for number in range(file.num_row_groups):
                first = next(file.iter_batches(1, row_groups=[number]), None)
                longest = max(map(_longest, first.columns if first else ()), default=0)
                group = file.metadata.row_group(number)
                for column in map(group.column, range(group.num_columns)):
                    is_text, prefixes = column.physical_type == "BYTE_ARRAY", "DELTA_BYTE_ARRAY" in column.encodings
                    of_value = (math.inf if prefixes else longest) if is_text else 16
                    bound += column.total_uncompressed_size + column.num_values * of_value
        return bound

    def unpacked_bytes(self, path: Path) -> Iterator[int]:
        """See `Reader`. A value that rows repeat is in the file once, so texts are read as places in a dictionary."""
        with _with_dictionaries(path) as file:
            for batch in file.iter_batches(_ROWS_AT_ONCE):
                yield sum(map(_logical_bytes, batch.columns))


def _with_dictionaries(path: Path) -> Any:
    """Open a Parquet file in which texts stay places in a dictionary."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    texts = [one for one in columns if one.physical_type == "BYTE_ARRAY" and one.has_dictionary_page]
    return ParquetFile(path, read_dictionary=list({one.path_in_schema for one in texts}))


def _leaves(column: Any) -> Iterator[Any]:
    """Yield the columns of values within a column of lists or objects."""
    import pyarrow

    if pyarrow.types.is_struct(column.type):
        yield from (leaf for inner in column.flatten() for leaf in _leaves(inner))
    elif pyarrow.types.is_list(column.type):
        yield from _leaves(column.flatten())
    else:
        yield column


def _longest(column: Any) -> int:
    """Return the bytes of the longest value of the dictionaries of a column."""
    from pyarrow import compute, types

    found = [
        compute.max(compute.binary_length(one.dictionary)) for one in _leaves(column) if types.is_dictionary(one.type)
    ]
    return max((value.as_py() or 0 for value in found), default=0)


def _logical_bytes(column: Any) -> int:
    """Return the bytes of a column, in which each use of a value of a dictionary counts."""
    from pyarrow import compute, types

    return sum(
        compute.sum(compute.binary_length(one.dictionary).take(one.indices)).as_py() or 0
        if types.is_dictionary(one.type)
        else one.nbytes
        for one in _leaves(column)
    )


class ExcelReader(Reader):
    """The first sheet of each file; its first row holds the names of the columns."""

    endings = (".xlsx",)
    is_text = False

    def bound_bytes(self, path: Path) -> float:
        return sum(self.unpacked_bytes(path))

    def unpacked_bytes(self, path: Path) -> Iterator[int]:
        with suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
            yield from (member.file_size for member in archive.infolist())

    def load(self, files: Files) -> Loaded:
        import datasets
        import pandas

        try:
            import openpyxl  # noqa: F401
        except ImportError as error:
            raise UsageError(
                f"`{files.key}` names Excel files, which need openpyxl: pip install openpyxl; or save the sheet as CSV"
            ) from error
        frames, notes = [], []
        for path in files.paths:
            with pandas.ExcelFile(path) as book:
                first, *others = map(str, book.sheet_names)
                frames.append(pandas.read_excel(book, keep_default_na=False, na_values=[""]))
            if others:
                unread = listed([f"`{name}`" for name in others], _SHEETS_SHOWN)
                notes.append(
                    f"`{files.key}`: of the sheets of `{path.name}`, the first, `{first}`, is read; to read {unread}"
                    " too, save each as a file"
                )
        frame = pandas.concat(frames, ignore_index=True)
        return (datasets.Dataset.from_pandas(frame, preserve_index=False) if len(frame) else None), notes


class ConllReader(Reader):
    """CoNLL: a row for each sentence."""

    endings = (".conll", ".bio", ".iob")

    def load(self, files: Files) -> Loaded:
        import datasets

        encoding = "utf-8-sig" if files.text.encoding == "utf-8" else files.text.encoding
        rows = [row for path in files.paths for row in _rows(path, encoding, f"`{path}`")]
        return (datasets.Dataset.from_list(rows) if rows else None), []

    def rows(self, path: Path, where: str) -> Iterator[Row | DataError]:
        return _rows(path, "utf-8-sig", where)


def _rows(path: Path, encoding: str, where: str) -> Iterator[Row]:
    with open_text(path, encoding) as file:
        yield from _conll_rows(file, where)


def _conll_rows(lines: Iterable[str], where: str) -> Iterator[dict[str, list[str]]]:
    """Yield a row for each sentence: `words` from the first column and, if there are several, `tags` from the last.

    Tabs separate the columns of a line with a tab, and spaces those of other lines. Lines that begin with `-DOCSTART-`
    are left out.

    Raises:
        DataError: lines differ in their number of columns, or a word or a tag is empty.
    """
    sentence: list[list[str]] = []
    width = first = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            if sentence:
                yield _row(sentence)
            sentence = []
            continue
        if line.startswith("-DOCSTART-"):
            continue
        text = line.rstrip("\r\n")
        columns = [column.strip() for column in text.split("\t")] if "\t" in text else text.split()
        if not width:
            width, first = len(columns), number
        if len(columns) != width:
            raise DataError(
                f"line {number} of {where} must have {width} columns, as line {first} has, but has {len(columns)}:"
                f" {text!r}; correct or remove it"
            )
        if not columns[0] or not columns[-1]:
            raise DataError(f"line {number} of {where} must have a word and a tag, but one is empty: {text!r}")
        sentence.append(columns)
    if sentence:
        yield _row(sentence)


def _row(sentence: list[list[str]]) -> dict[str, list[str]]:
    words = {"words": [columns[0] for columns in sentence]}
    return words | ({"tags": [columns[-1] for columns in sentence]} if len(sentence[0]) > 1 else {})


Format = Literal["json", "csv", "parquet", "excel", "conll", "megatron"]
READERS: Mapping[Format, Reader] = {
    "json": JsonReader(),
    "csv": CsvReader(),
    "parquet": ParquetReader(),
    "excel": ExcelReader(),
    "conll": ConllReader(),
    "megatron": MegatronReader(),
}
FORMAT_OF_ENDING: Mapping[str, Format] = {end: name for name, reader in READERS.items() for end in reader.endings}


def format_of(path: Path) -> Format | None:
    """Return the format that the ending of a file names, without `.gz`; None: it is unknown."""
    return FORMAT_OF_ENDING.get(ending(path))
