"""The readers of registered formats. A reader is imported when a file of its format is read."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from trainer.base.extensions import resolved
from trainer.base.file_formats import file_formats, formats_by_ending
from trainer.data.formats.base import Reader, ending


def reader_of(file_format: str) -> Reader:
    """Return the reader of a format."""
    return _built(file_formats()[file_format].reader)


@cache
def _built(reader: str) -> Reader:
    built: Reader = resolved(reader)()
    return built


def format_of(path: Path) -> str | None:
    """Return the format that the ending of a file names, without `.gz`; None: it is unknown."""
    return formats_by_ending().get(ending(path))
