"""The reader of CSV: one row on each line, with values between commas, semicolons, tabs or vertical bars."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.base.errors import DataError
from trainer.base.text import number_in
from trainer.data.formats.base import (
    NULLS,
    CellKind,
    Files,
    Loaded,
    Reader,
    Row,
    TextOptions,
    ending,
    load_with_datasets,
    open_text,
    other_columns,
    require_own_names,
    rows_of_part,
)
from trainer.data.formats.typed import with_types

if TYPE_CHECKING:
    from datasets import Dataset

_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_TAB_ENDINGS = (".tsv", ".tab")
_SNIFFED_LINES = 20
_ROWS_LOOKED_AT = 1000
_LONGEST_NAME, _LONGEST_VALUE = 60, (1 << 31) - 1  # characters
_UNQUOTED = "set `data.quotes` to false if quotation marks are part of texts"
_JOINED = f"a quotation mark in its text opens a value that joins rows; {_UNQUOTED}"
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""Starts of formulas: https://owasp.org/www-community/attacks/CSV_Injection."""

_END = "\x00end of the file\x00"
"""A line behind the last one, which becomes a part of a value if a quotation mark is not closed."""


class CsvReader(Reader):
    """CSV with a line of names; the values of rows to predict are texts."""

    def load(self, files: Files) -> Loaded:
        """See `Reader`; all values are texts, see `typed`."""
        import datasets
        import pandas

        paths, text, key = files.paths, files.text, files.key
        delimiter, notes = _common_delimiter(files)
        notes = [*_header_notes(files), *notes]
        options: dict[str, Any] = {**NULLS, "sep": delimiter}
        if text.encoding != "utf-8":
            options["encoding"] = text.encoding
        if not text.quotes:
            options["quoting"] = csv.QUOTE_NONE
        try:
            # By pandas, with which `datasets` reads the rows, so that both find the same names.
            header = pandas.read_csv(paths[0], nrows=0, **options).columns
            # All as texts: pandas would guess the type of each block of rows, and lose leading zeros.
            texts = datasets.Features(dict.fromkeys(header, datasets.Value("string")))
            return load_with_datasets("csv", files, features=texts, **options), notes
        except (datasets.exceptions.DatasetsError, ValueError):
            for path in paths:
                if (line := self._unclosed(path, text)) is not None:
                    raise DataError(
                        f"`{key}` must hold csv, but line {line} of `{path}` opens a quotation mark that is not closed;"
                        f" {_UNQUOTED}, or close it"
                    ) from None
            raise

    def typed(self, parts: Sequence[Dataset], kinds: Mapping[str, CellKind]) -> list[Dataset]:
        return with_types(parts, kinds)

    def notes(self, rows: Dataset, path: Path, text: TextOptions, where: str) -> list[str]:
        return _open_quotes_notes(rows, path, text, where)

    def _unclosed(self, path: Path, text: TextOptions) -> int | None:
        """Return the first line of a row that the end of the file ends within quotation marks; None: there is none."""
        line, cells = 0, [_END]
        # An open quotation mark takes the line behind the last one into its value, where it shows.
        with suppress(csv.Error), _opened(path, text, _END) as lines:
            for line, cells in _numbered(lines):  # noqa: B007
                pass
        return line if cells[-1].endswith(_END) and cells != [_END] else None

    def rows(self, path: Path, where: str, text: TextOptions) -> Iterator[Row | DataError]:
        with _opened(path, text, _END) as lines:
            delimiter = lines.dialect.delimiter
            names: list[str] = next((cells for cells in lines if cells), [])
            require_own_names(names, where)
            if names and names[-1].endswith(_END) and names != [_END]:
                raise DataError(f"the names of the columns of {where} must close their quotation mark; close it")
            rows = (cells for cells in lines if cells != [_END])
            for number, cells in enumerate(_with_empty_rows(rows) if len(names) == 1 else filter(None, rows), start=1):
                if fault := _fault(cells, len(names), delimiter):
                    yield DataError(f"row {number} of {where} must {fault}")
                else:
                    yield dict(zip(names, cells, strict=True))

    def write(
        self, parts: Sequence[Path], path: Path, source: Path | None = None, escapes_formulas: bool = False
    ) -> None:
        shown = _escaped if escapes_formulas else str
        # CSV needs its columns first, so the parts are read twice; rows of an error have other columns.
        columns = list(dict.fromkeys(column for part in parts for row in rows_of_part(part) for column in row))
        with path.open("w", encoding="utf-8", newline="") as text:
            writer = csv.writer(text, delimiter="\t" if ending(path) in _TAB_ENDINGS else ",")
            writer.writerow(map(shown, columns))
            for row in chain.from_iterable(map(rows_of_part, parts)):
                cells = [_cell(row.get(column)) for column in columns]
                writer.writerow([shown(cell) if isinstance(cell, str) else cell for cell in cells])

    def num_empty(self, path: Path, text: TextOptions) -> int:
        with _opened(path, text) as lines:
            is_one = len(next((cells for cells in lines if cells), [])) == 1  # an empty line is then a row
            return 0 if is_one else sum(not cells for cells in lines)

    def first_lines(self, path: Path, text: TextOptions) -> Iterator[int]:
        with _opened(path, text) as lines:
            yield from (line for line, _ in islice(_numbered(lines), 1, None))  # without the names


def _fault(cells: Sequence[str], num_columns: int, delimiter: str) -> str:
    if cells[-1].endswith(_END):
        return f"close its quotation mark; close it, or {_UNQUOTED}"
    if len(cells) != num_columns:
        return "have as many values as there are columns; correct it"
    # Such a value has joined rows, whose number of values is right by chance.
    if delimiter == "\t" and any("\t" in cell and "\n" in cell for cell in cells):
        return f"have one line, but {_JOINED}"
    return ""


def _numbered(rows: Any) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows that a reader of `csv` finds, without empty lines, with the first line of each."""
    last = 0
    for cells in rows:
        if cells:
            yield last + 1, cells
        last = rows.line_num


@contextmanager
def _opened(path: Path, text: TextOptions, *behind: str) -> Iterator[Any]:
    """Yield the reader of the rows of a file, with further lines behind its own; see `csv.reader`."""
    with open_text(path, text.encoding) as file:
        yield _cells(chain(file, behind), text, _delimiter_of(path, text))


def _cells(lines: Iterable[str], text: TextOptions, delimiter: str) -> Any:
    # A setting of the process; the default refuses values above 131,072 characters.
    csv.field_size_limit(_LONGEST_VALUE)
    return csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_MINIMAL if text.quotes else csv.QUOTE_NONE)


def _delimiter_of(path: Path, text: TextOptions) -> str:
    """Return the given delimiter, or that with the same number of columns, and the most, in the first lines."""
    if text.delimiter is not None:
        return text.delimiter
    if ending(path) in _TAB_ENDINGS:
        return "\t"
    with open_text(path, text.encoding) as file:
        lines = [line for _, line in zip(range(_SNIFFED_LINES), file, strict=False)]
    best, most = ",", 1
    for delimiter in _DELIMITERS:
        widths = [len(row) for row in _cells(lines, text, delimiter) if row]
        # The names and the first row must have as many values; later rows may hold text with the mark.
        if widths and widths[0] > most and widths[0] == widths[min(1, len(widths) - 1)]:
            best, most = delimiter, widths[0]
            if delimiter == ",":
                break
    return best


def _with_empty_rows(lines: Iterable[list[str]]) -> Iterator[list[str]]:
    """Yield the rows of one column, where an empty line is an empty text, except at the end of the file."""
    num_empty = 0
    for cells in lines:
        if cells:
            yield from [[""]] * num_empty
            yield cells
        num_empty = 0 if cells else num_empty + 1


def _is_value(name: str) -> bool:
    """Return whether a name of a column looks like a number or a text, as in a file without names."""
    return len(name) > _LONGEST_NAME or re.fullmatch(r"\s*[-+]?\d*[.,]?\d+\s*", name) is not None


def _names(path: Path, text: TextOptions, key: str) -> list[str]:
    """Return the names of the columns of a CSV file, each a name of its own.

    pandas renames the second of two equal names, and moves all columns by one if the rows have one value more than
    there are names.

    Raises:
        DataError: two columns have one name, or the first row has more values than there are names.
    """
    with _opened(path, text) as lines:
        rows = filter(None, lines)
        # Codecs such as utf-16-le keep the mark at the start of a file.
        names = [name.lstrip("\ufeff") for name in next(rows, [])]
        first: list[str] = next(rows, [])
    twice = sorted({name for name in names if names.count(name) > 1 and name.strip()})
    if twice:
        raise DataError(
            f"`{key}` must name files with a name of its own for each column, but `{path}` names `{twice[0]}` more than"
            " once; rename one, or add a line of names if the file has none"
        )
    if len(first) > len(names):
        raise DataError(
            f"`{key}` must name files with a name for each column, but `{path}` has {len(names)} names and {len(first)}"
            " values in its first row; add the missing name, or remove the delimiter at the end of the lines"
        )
    return names


def _common_delimiter(files: Files) -> tuple[str, list[str]]:
    """Return the delimiter of all files, and a note if it was not named and is unusual.

    Raises:
        DataError: files have other delimiters than the first one.
    """
    text, key, first_path = files.text, files.key, files.paths[0]
    delimiters = {path: _delimiter_of(path, text) for path in files.paths}
    first = delimiters[first_path]
    for path, delimiter in delimiters.items():
        if delimiter != first:
            raise DataError(
                f"`{key}` must name files with one delimiter, but `{first_path}` has {_DELIMITERS[first]} and `{path}`"
                " has others; set `data.delimiter` if a guess is wrong"
            )
    if text.delimiter is not None or first == "," or ending(first_path) != ".csv":
        return first, []
    return first, [f"`{key}`: `{first_path.name}` is read with {_DELIMITERS[first]} between its columns"]


def _header_notes(files: Files) -> list[str]:
    """Return a note on the first file with a line of names that looks like a row.

    Raises:
        DataError: a file has other columns than the first one.
    """
    names = {path: _names(path, files.text, files.key) for path in files.paths}
    for path, header in names.items():
        if problem := other_columns(header, names[files.paths[0]]):
            raise DataError(f"`{files.key}` must hold csv, but `{path}` cannot be read: {problem}")
    for path, header in names.items():
        if value := next(filter(_is_value, header), None):
            return [
                f"`{files.key}`: the first line of `{path.name}` is read as names, but `{value:.40}` looks like a"
                " value; if the file has no names, add a line of them, such as text,label"
            ]
    return []


def _open_quotes_notes(rows: Dataset, path: Path, text: TextOptions, where: str) -> list[str]:
    """Return a note on a cell of a CSV file that looks like several rows, because a quotation mark in a text opened it.

    Raises:
        DataError: a cell holds a line break and the tab that separates the columns.
    """
    import pyarrow.compute as pc

    if not text.quotes or len(rows.features) < 2:
        return []
    delimiter = _delimiter_of(path, text)
    for name, feature in rows.features.items():
        if "string" not in str(getattr(feature, "dtype", "")):
            continue
        column = rows.data.column(name)
        held = pc.and_(pc.match_substring(column, "\n"), pc.match_substring(column, delimiter))
        for row in pc.indices_nonzero(pc.fill_null(held, False)).to_pylist()[:_ROWS_LOOKED_AT]:
            lines = column[row].as_py().split("\n")[:-1]
            if delimiter == "\t":
                raise DataError(
                    f"column `{name}`, row {row + 1} of {where} holds a tab and a line break, because a quotation mark"
                    f" opens a value and joins rows; {_UNQUOTED}"
                )
            if any(line.count(delimiter) == len(rows.features) - 1 for line in lines):
                return [f"column `{name}`, row {row + 1} of {where} holds lines that look like rows; {_UNQUOTED}"]
    return []


def _escaped(text: str) -> str:
    """Return a text with an apostrophe before it if a spreadsheet would take it for a formula; a number is none."""
    return f"'{text}" if text.startswith(_FORMULA_STARTS) and number_in(text) is None else text


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return value if plain else json.dumps(value, ensure_ascii=False)
