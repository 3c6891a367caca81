"""Rows of files that may be larger than memory, in chunks."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.base.errors import DataError, UsageError
from trainer.base.file_formats import file_formats, formats_by_ending
from trainer.data.formats.base import Row, TextOptions, reason, require_bounded
from trainer.data.formats.table import reader_of
from trainer.data.readers import is_other, other_encoding

_PLAIN = TextOptions()


def input_format(path: Path, stored: str | None = None) -> str:
    """Return the format of a file to predict by its ending, or else the one that a recipe stores.

    Raises:
        UsageError: the ending is unknown.
    """
    return _named(path, "--input", [name for name, row in file_formats().items() if row.in_chunks], stored)


def output_format(path: Path) -> str:
    """Return the format of a file to write by its ending.

    Raises:
        UsageError: the ending is unknown.
    """
    return _named(path, "--output", [name for name, row in file_formats().items() if row.is_written])


def _named(path: Path, key: str, names: Sequence[str], stored: str | None = None) -> str:
    formats = {end: name for end, name in formats_by_ending().items() if name in names}
    file_format = formats.get(path.suffix.lower(), stored if stored in names else None)
    if file_format is None:
        raise UsageError(f"`{key}` must end with {', '.join(formats)}, but is {path.name}; rename or convert it")
    return file_format


def read_chunks(
    path: Path,
    file_format: str,
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
        # Rows have no fixed size in a file, so those before are read too.
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
