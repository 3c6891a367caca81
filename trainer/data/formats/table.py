"""The table of formats, with the readers of Excel and CoNLL."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from trainer.base.errors import DataError, UsageError
from trainer.base.text import listed
from trainer.data.formats.base import (
    Files,
    Loaded,
    Reader,
    Row,
    TextOptions,
    ending,
    open_text,
)
from trainer.data.formats.csv_files import NULLS, CsvReader
from trainer.data.formats.json_lines import JsonReader
from trainer.data.formats.megatron import MegatronReader
from trainer.data.formats.parquet import ParquetReader

_SHEETS_SHOWN = 5


class ExcelReader(Reader):
    """One sheet of each file; its first row holds the names of the columns."""

    endings = (".xlsx",)
    is_text = False

    def bound_bytes(self, path: Path) -> float:
        return sum(self.unpacked_bytes(path))

    def unpacked_bytes(self, path: Path) -> Iterator[int]:
        with suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
            yield from (member.file_size for member in archive.infolist())

    def load(self, files: Files) -> Loaded:
        """See `Reader`; all values are texts, see `with_types`."""
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
                names = list(map(str, book.sheet_names))
                sheet = names[0] if files.text.sheet is None else files.text.sheet
                if sheet not in names:
                    shown = listed([f"`{name}`" for name in names], _SHEETS_SHOWN)
                    raise DataError(f"`data.sheet` must name a sheet of `{path}`, but is {sheet!r}; it has {shown}")
                frames.append(pandas.read_excel(book, sheet, dtype=str, **NULLS).rename(columns=str))
            if len(names) > 1 and files.text.sheet is None:
                unread = listed([f"`{name}`" for name in names[1:]], _SHEETS_SHOWN)
                notes.append(
                    f"`{files.key}`: of the sheets of `{path.name}`, the first, `{sheet}`, is read; to read {unread}"
                    " instead, set `data.sheet`; to read several, save each as a file"
                )
        frame = pandas.concat(frames, ignore_index=True)
        return (datasets.Dataset.from_pandas(frame, preserve_index=False) if len(frame) else None), notes


class ConllReader(Reader):
    """CoNLL: a row for each sentence."""

    endings = (".conll", ".bio", ".iob")

    def load(self, files: Files) -> Loaded:
        import datasets

        rows = [row for path in files.paths for row in _rows(path, files.text.encoding, f"`{path}`")]
        return (datasets.Dataset.from_list(rows) if rows else None), []

    def rows(self, path: Path, where: str, text: TextOptions) -> Iterator[Row | DataError]:
        return _rows(path, text.encoding, where)


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
