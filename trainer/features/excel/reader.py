"""The reader of Excel files, by pandas and openpyxl."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.base.errors import DataError, UsageError
from trainer.base.text import listed
from trainer.data.formats.base import NULLS, CellKind, Files, Loaded, Reader, Row, TextOptions
from trainer.data.formats.typed import with_types

if TYPE_CHECKING:
    from datasets import Dataset
    from pandas import DataFrame, ExcelFile

_SHEETS_SHOWN = 5


class ExcelReader(Reader):
    """One sheet of each file; its first row holds the names of the columns."""

    is_text = False

    def tables(self, path: Path) -> tuple[str, list[str]]:
        """Return the key of `data` that names a sheet, and the names of the sheets.

        Raises:
            OSError: the file is damaged.
        """
        import pandas

        if not zipfile.is_zipfile(path):
            return "sheet", []  # `load` refuses it
        try:
            with pandas.ExcelFile(path) as book:
                return "sheet", list(map(str, book.sheet_names))
        except (ImportError, ValueError, KeyError) as error:  # `load` names them
            raise OSError(str(error)) from error

    def bound_bytes(self, path: Path) -> float:
        return sum(self.unpacked_bytes(path))

    def unpacked_bytes(self, path: Path) -> Iterator[int]:
        with suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
            yield from (member.file_size for member in archive.infolist())

    def load(self, files: Files) -> Loaded:
        """See `Reader`; all values are texts, see `typed`."""
        import datasets
        import pandas

        try:
            import openpyxl  # noqa: F401
        except ImportError as error:
            raise UsageError(
                f"`{files.key}` names Excel files, which need openpyxl: pip install openpyxl; or save the sheet as CSV"
            ) from error
        frames, notes, chosen = [], [], files.text.further.get("sheet")
        for path in files.paths:
            if not zipfile.is_zipfile(path):
                raise DataError(f"`{files.key}` must hold Excel files, but `{path}` is none; save it again as .xlsx")
            with pandas.ExcelFile(path) as book:
                names = list(map(str, book.sheet_names))
                sheet = names[0] if chosen is None else chosen
                if sheet not in names:
                    shown = listed([f"`{name}`" for name in names], _SHEETS_SHOWN)
                    raise DataError(f"`data.sheet` must name a sheet of `{path}`, but is {sheet!r}; it has {shown}")
                frame = pandas.read_excel(book, sheet, dtype=str, **NULLS).rename(columns=str)
                frames.append(_with_zeros(frame, path, book, sheet))
            if len(names) > 1 and chosen is None:
                unread = listed([f"`{name}`" for name in names[1:]], _SHEETS_SHOWN)
                notes.append(
                    f"`{files.key}`: of the sheets of `{path.name}`, the first, `{sheet}`, is read; to read {unread}"
                    " instead, set `data.sheet`; to read several, save each as a file"
                )
        frame = pandas.concat(frames, ignore_index=True)
        return (datasets.Dataset.from_pandas(frame, preserve_index=False) if len(frame) else None), notes

    def rows(self, path: Path, where: str, text: TextOptions) -> Iterator[Row | DataError]:
        """See `Reader`; a sheet has at most a million rows, which are read at once."""
        loaded, _ = self.load(Files([path], text, "--input"))
        yield from loaded or ()

    def num_empty(self, path: Path, text: TextOptions) -> int:
        return 0

    def typed(self, parts: Sequence[Dataset], kinds: Mapping[str, CellKind]) -> list[Dataset]:
        return with_types(parts, kinds)


def _with_zeros(frame: DataFrame, path: Path, book: ExcelFile, sheet: str) -> DataFrame:
    """Give whole numbers the leading zeros that Excel shows by a number format such as 000, as people read them."""
    with zipfile.ZipFile(path) as archive:
        styles = archive.read("xl/styles.xml") if "xl/styles.xml" in archive.namelist() else b""
    if not re.search(rb'formatCode="00+"', styles):  # most workbooks: their cells are not read a second time
        return frame
    texts: list[dict[str, str]] = [{} for _ in frame.columns]  # of each column, by the number without zeros
    for row in book.book[sheet].iter_rows():
        for column, cell in zip(texts, row, strict=False):
            if isinstance(cell.value, int) and cell.value >= 0 and re.fullmatch("00+", cell.number_format):
                column[str(cell.value)] = str(cell.value).zfill(len(cell.number_format))
    for place, column in enumerate(texts):
        # By place, because two columns may have one name.
        frame.isetitem(place, frame.iloc[:, place].replace(column))
    return frame
