"""Files of rows: which ones a recipe names, their rows, and the places of rows in them."""

from __future__ import annotations

import errno
import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainer.base.disk import FOLDER_FIX, no_file
from trainer.base.errors import DataError, UsageError, causes, storage_error
from trainer.base.file_formats import formats_by_ending
from trainer.base.text import without_secrets
from trainer.data.formats.base import (
    DAMAGED,
    Files,
    Loaded,
    TextOptions,
    open_bytes,
    open_text,
    reason,
    require_bounded,
    wide_encoding,
)
from trainer.data.formats.table import format_of, reader_of
from trainer.recipe.paths import is_url

_LFS_POINTER = b"version https://git-lfs"
_LARGE_BYTES = 1 << 26


def files_of(value: str | Sequence[str] | None, key: str) -> list[Path]:
    """Return the files of the recipe's `key`; patterns such as `part-*.jsonl` give their matches in order.

    Raises:
        DataError: a file is missing, denies reading, or is a pointer of Git LFS or a URL; a pattern matches no file.
    """
    paths: list[Path] = []
    for name in [value] if isinstance(value, str) else value or []:
        if is_url(name):
            shown = without_secrets(name)
            raise DataError(f"`{key}` must name files of this machine, but names `{shown}`; copy it to this machine")
        # A file may have brackets in its name.
        if glob.has_magic(name) and not Path(name).exists():
            # Sorted, because `glob` has the order of the file system, which differs between machines.
            matched = [Path(path) for path in sorted(glob.glob(name, recursive=True)) if Path(path).is_file()]
            if not matched:
                raise DataError(f"`{key}` must name files, but no file matches `{name}`; correct the pattern")
            paths += matched
        else:
            paths.append(Path(name))
    for path in paths:
        _require_file(path, key)
    return paths


@contextmanager
def reading(key: str) -> Iterator[None]:
    """Turn an error of the file system in the block into one for the user.

    Raises:
        DataError: a file of the recipe's `key` cannot be read.
    """
    try:
        yield
    except OSError as error:
        file = f"`{error.filename}`" if error.filename else "one of them"
        raise DataError(
            f"`{key}` must name files that can be read, but {file} cannot be: {error.strerror or error}; restore its"
            " disk or its permissions"
        ) from error


def _require_file(path: Path, key: str) -> None:
    if not path.is_file():
        fix = FOLDER_FIX if path.is_dir() else ""
        raise DataError(f"`{key}` must name files, but `{path}` {no_file(path)}{fix}")
    if not os.access(path, os.R_OK):
        raise DataError(
            f"`{key}` must name files that can be read, but `{path}` does not allow it; change its permissions"
        )
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise DataError(
                f"`{key}` must name files of rows, but `{path}` is a pointer of Git LFS; run `git lfs pull` in its"
                " folder"
            )


def common_format(paths: Sequence[Path]) -> str:
    """Return the common format of all file name endings.

    Raises:
        UsageError: an ending is unknown, or there are several formats.
    """
    formats = {path: format_of(path) for path in paths}
    for path, file_format in formats.items():
        if path.suffix == ".ds":
            raise UsageError(
                f"`{path}` must be a file of rows, but token files of nanotron and datatrove (.ds) are not read; write"
                " their documents as Parquet with a column `input_ids`"
            )
        if file_format is None:
            raise UsageError(
                f"`data.format` must be set where the ending does not tell it, but is null and a file is `{path.name}`;"
                f" known endings are {', '.join(formats_by_ending())}, each also with .gz"
            )
    first, *others = formats.items()
    for path, file_format in others:
        if file_format != first[1]:
            raise UsageError(
                f"`data.train` and `data.validation` must be files of one format, but `{first[0].name}` is {first[1]}"
                f" and `{path.name}` is {file_format}; convert one, or set `data.format` if an ending is wrong"
            )
    assert first[1] is not None
    return first[1]


def is_large(paths: Sequence[Path]) -> bool:
    """Return whether files take seconds to read."""
    return sum(path.stat().st_size for path in paths) > _LARGE_BYTES


def read_files(file_format: str, files: Files) -> Loaded:
    """Return the rows of files, or None without a row, and notes for the user.

    Raises:
        DataError: a file has the wrong format or encoding.
        UsageError: a package for the format is missing.
    """
    import datasets

    key, encoding, reader = files.key, files.text.encoding, reader_of(file_format)
    for path in files.paths:
        if not path.stat().st_size:
            raise DataError(f"`{key}` must hold at least one row, but `{path}` is empty; name another file")
        require_bounded(reader, path, f"`{key}`")
    try:
        if reader.is_text and (wide := next(filter(partial(is_other, encoding), files.paths), None)):
            raise DataError(other_encoding(wide, f"`{wide}`", encoding, key))
        return reader.load(files)
    except (datasets.exceptions.DatasetsError, ValueError, RecursionError, *DAMAGED) as error:
        if "corresponds to no data" in str(error):  # the message of `datasets` for files without rows
            return None, []
        refuse_datasets_cache(error)
        if wrong := _not_in(encoding, files.paths):
            raise DataError(other_encoding(wrong, f"`{wrong}`", encoding, key)) from error
        problem = reader.fault(files)
        if problem is None:
            problem = f"{', '.join(f'`{path}`' for path in files.paths)} cannot be read: {reason(error)}"
            if key == "data.train" and len(files.paths) > 1:
                problem += "; `data.maps` reads each entry of `data.train` by itself"
        raise DataError(f"`{key}` must hold {file_format}, but {problem}") from error


def is_other(encoding: str, path: Path) -> bool:
    """Return whether a file is in UTF-16 or UTF-32 by its begin, or in UTF-8, and the encoding is another one."""
    if wide := wide_encoding(path):
        return not encoding.startswith(wide[:6])
    return not encoding.startswith("utf") and _is_utf8(path)


def other_encoding(path: Path, where: str, encoding: str, key: str) -> str:
    """Return the problem of a file that is no text in an encoding; `where` is its name in messages."""
    problem = f"`{key}` must hold text in the encoding {encoding}, but"
    if _is_utf8(path):
        return f"{problem} {where} is in UTF-8; set `data.encoding` to utf-8"
    line, likely = _first_bad_line(path) if encoding == "utf-8" else None, wide_encoding(path) or "latin-1"
    if line is not None:
        return f"{problem} line {line} of {where} does not, though others do; correct it"
    return f"{problem} {where} does not; save it as UTF-8, or name its encoding in `data.encoding`, such as {likely}"


def _is_utf8(path: Path) -> bool:
    """Return whether a file is UTF-8 with characters beyond ASCII."""
    has_others = False
    with open_bytes(path) as file:
        for line in file:
            try:
                has_others |= not line.decode().isascii()
            except UnicodeDecodeError:
                return False
    return has_others


def _first_bad_line(path: Path) -> int | None:
    """Return the first line that is not UTF-8 if others are, beyond ASCII, or it has half of a surrogate pair."""
    bad, is_utf8 = None, False
    with open_bytes(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                is_utf8 |= not line.decode(errors="surrogatepass").isascii()
                line.decode()
            except UnicodeDecodeError:
                bad = bad or number
    return bad if is_utf8 else None


def _not_in(encoding: str, paths: Sequence[Path]) -> Path | None:
    """Return the first file that is not text in `encoding`; None if all are, or are no text files."""
    for path in paths:
        if not reader_of(format_of(path) or "json").is_text:
            continue
        try:
            with open_text(path, encoding) as file:
                for _ in file:
                    pass
        except UnicodeError:
            return path
        except DAMAGED:
            continue
    return None


@dataclass(frozen=True)
class RowPlaces:
    """The places of rows in text files, found again when a message needs one.

    Attributes:
        chosen: the number of each row in the files, from 0; None: the rows are all rows of the files.
    """

    paths: tuple[Path, ...]
    file_format: str
    text: TextOptions
    chosen: NDArray[np.int64] | None = None

    def of(self, row: int) -> str | None:
        """Return the place of a row, from 0: "line 7", or "line 7 of `a.csv`"; None if it is not of interest."""
        # Rows that a map or a split left out count in the file, too.
        number = row if self.chosen is None else int(self.chosen[row])
        for path in self.paths:
            for line in reader_of(self.file_format).first_lines(path, self.text):
                if number == 0:
                    where = f" of `{path.name}`" if len(self.paths) > 1 else ""
                    return f"line {line}{where}" if where or line != row + 1 else None
                number -= 1
        return None


def refuse_datasets_cache(error: BaseException | None) -> None:
    """Raise an error for the folder in which `datasets` keeps prepared files, if `error` names a file there.

    Raises:
        UsageError: the folder cannot be written.
        TrainerError: the disk is full.
    """
    import datasets

    folder = str(datasets.config.HF_DATASETS_CACHE)
    for cause in (error, *causes(error)):
        if isinstance(cause, OSError) and (
            str(cause.filename or "").startswith(folder) or cause.errno in (errno.ENOSPC, errno.EDQUOT)
        ):
            raise storage_error(
                f"the cache of `datasets` must be a folder that can be written, but {folder} is not: {cause.strerror};"
                " make room, or set HF_DATASETS_CACHE or HF_HOME to another folder",
                cause,
            ) from cause
