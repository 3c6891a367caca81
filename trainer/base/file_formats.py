"""The formats of files of rows, as registered rows that name their readers as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainer.base.extensions import rows_of


@dataclass(frozen=True)
class FileFormat:
    """A format of files of rows.

    Attributes:
        reader: The text "module:name" of its `Reader`.
        shown: Its name in texts.
        endings: The endings of its files, in small letters; `.gz` may follow.
        note: A text on it for the key `data.format`.
        keys: Further keys of `data`, which its files alone have.
        has_header: Whether its first row holds the names of the columns.
        in_chunks: Whether its reader has `rows`, for files to predict.
        is_written: Whether its reader has `write`.
    """

    reader: str
    shown: str
    endings: Sequence[str]
    note: str = ""
    keys: Sequence[str] = ()
    has_header: bool = False
    in_chunks: bool = False
    is_written: bool = False


def file_formats() -> dict[str, FileFormat]:
    """Return the registered formats by their names; a row of `extension.json` holds their attributes."""
    return rows_of("format", FileFormat)


def formats_by_ending() -> dict[str, str]:
    """Return the name of the format of each ending."""
    return {end: name for name, row in file_formats().items() for end in row.endings}


def shown_names(formats: Iterable[FileFormat]) -> str:
    """Return the names of formats as a text: "JSON Lines, CSV or Parquet"."""
    *names, last = (row.shown for row in formats)
    return f"{', '.join(names)} or {last}" if names else last
