"""Readers of data files: JSON Lines, JSON, CSV, Parquet, Excel and CoNLL, also compressed by gzip."""

from __future__ import annotations

import csv
import errno
import functools
import glob
import gzip
import itertools
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from trainer.base.disk import FOLDER_FIX, no_file
from trainer.base.errors import DataError, UsageError, causes, storage_error
from trainer.data.conll import CONLL_ENDINGS, conll_rows

if TYPE_CHECKING:
    from datasets import Dataset, Features

Format = Literal["json", "csv", "parquet", "excel", "conll"]

_FORMAT_OF_ENDING: dict[str, Format] = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".tab": "csv",
    ".parquet": "parquet",
    ".xlsx": "excel",
    **dict.fromkeys(CONLL_ENDINGS, "conll"),
}
_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_LFS_POINTER = b"version https://git-lfs"
_SNIFFED_LINES = 20
_CELLS_LOOKED_AT = 1000
_LARGE_BYTES = 1 << 26
_LONGEST_REASON = 400  # maximum length of a reader's message, in characters
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_DAMAGED = (OSError, EOFError, zlib.error)
"""Errors of files that cannot be read or unpacked."""


@dataclass(frozen=True)
class TextOptions:
    """How text files are read.

    Attributes:
        encoding: their encoding.
        delimiter: the delimiter of CSV files; None: found in each file's first lines.
        quotes: whether quotation marks enclose values of CSV files; otherwise they are text.
    """

    encoding: str = "utf-8"
    delimiter: str | None = None
    quotes: bool = True

    def cells(self, lines: Iterable[str], delimiter: str) -> Any:
        """Return the reader of the rows of a CSV file, as of `csv.reader`."""
        return csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_MINIMAL if self.quotes else csv.QUOTE_NONE)


def files_of(value: str | Sequence[str] | None, key: str) -> list[Path]:
    """Return the files of the recipe's `key`; patterns such as `part-*.jsonl` give their matches in order.

    Raises:
        DataError: a file is missing, denies reading, or is a pointer of Git LFS; a pattern matches no file.
    """
    paths: list[Path] = []
    for name in [value] if isinstance(value, str) else value or []:
        if glob.has_magic(name) and not Path(name).exists():
            matched = [Path(path) for path in sorted(glob.glob(name, recursive=True)) if Path(path).is_file()]
            if not matched:
                raise DataError(f"`{key}` must name files, but no file matches `{name}`")
            paths += matched
        else:
            paths.append(Path(name))
    for path in paths:
        _require_file(path, key)
    return paths


def _require_file(path: Path, key: str) -> None:
    if not path.is_file():
        fix = FOLDER_FIX if path.is_dir() else ""
        raise DataError(f"`{key}` must name files, but `{path}` {no_file(path)}{fix}")
    if not os.access(path, os.R_OK):
        raise DataError(f"`{key}` must name files that can be read, but `{path}` denies it")
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise DataError(
                f"`{key}` must name files of rows, but `{path}` is a pointer of Git LFS; run `git lfs pull` in its"
                " folder"
            )


def common_format(paths: Sequence[Path]) -> Format:
    """Return the common format of all file name endings.

    Raises:
        UsageError: an ending is unknown, or there are several formats.
    """
    formats = {path: _FORMAT_OF_ENDING.get(_ending(path)) for path in paths}
    for path, file_format in formats.items():
        if file_format is None:
            raise UsageError(
                f"`data.format` must be set where the ending does not tell it, but is null and a file is `{path.name}`;"
                f" known endings are {', '.join(_FORMAT_OF_ENDING)}, each also with .gz"
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


def _ending(path: Path) -> str:
    """Return the ending in small letters, without `.gz`."""
    name = path.name.lower()
    return Path(name.removesuffix(".gz")).suffix


def is_large(paths: Sequence[Path]) -> bool:
    """Return whether files take seconds to read."""
    return sum(path.stat().st_size for path in paths) > _LARGE_BYTES


def read_files(
    paths: Sequence[Path],
    file_format: Format,
    text: TextOptions,
    key: str,
    most_rows: int | None = None,
) -> tuple[Dataset | None, list[str]]:
    """Return the rows of files, or None without a row, and notes for the user.

    Args:
        paths: the files.
        file_format: their format.
        text: how text files are read.
        key: the key of the recipe, for messages.
        most_rows: the number of rows to read; None: all.

    Raises:
        DataError: a file has the wrong format or encoding.
        UsageError: a package for the format is missing.
    """
    import datasets

    for path in paths:
        if not path.stat().st_size:
            raise DataError(f"`{key}` must hold at least one row, but `{path}` is empty")
    notes: list[str] = []
    options: dict[str, Any] = {}
    where = ", ".join(f"`{path}`" for path in paths)
    try:
        if file_format == "excel":
            return _read_excel(paths, key), []
        if file_format == "conll":
            return _read_conll(paths, text.encoding), []
        if file_format in ("csv", "json") and text.encoding != "utf-8":
            options["encoding"] = text.encoding
        if file_format == "csv":
            options |= {"keep_default_na": False, "na_values": [""]}  # "None" and "NA" may be names of classes
            if not text.quotes:
                options["quoting"] = csv.QUOTE_NONE
            parts = [text.delimiter or delimiter_of(path, text) for path in paths]
            options["sep"] = parts[0]
            for path, part in zip(paths, parts, strict=True):
                _require_names(path, text, part, key)
            if text.delimiter is None and parts[0] != "," and _ending(paths[0]) == ".csv":
                notes.append(f"`{key}`: `{paths[0].name}` is read with {_DELIMITERS[parts[0]]} between its columns")
            if len(set(parts)) > 1:
                other = paths[next(index for index, part in enumerate(parts) if part != parts[0])]
                raise DataError(
                    f"`{key}` must name files with one delimiter, but `{paths[0]}` has {_DELIMITERS[parts[0]]} and"
                    f" `{other}` has others; set `data.delimiter` if a guess is wrong"
                )
        if file_format == "json":
            _require_objects(paths, text.encoding, key, most_rows)
        options["data_files"] = [str(path.absolute()) for path in paths]
        load = functools.partial(datasets.load_dataset, file_format, split="train", **options)
        if most_rows is not None:
            rows = load(streaming=True)
            if chats := chat_features(rows.features or {}):
                rows = load(streaming=True, features=chats)
            # `datasets` would open the files that rows name, even if a row has the bytes of its image.
            first = list(rows.decode(False).take(most_rows))
            return (datasets.Dataset.from_list(first, features=_undecoded(rows.features)) if first else None), notes
        dataset = _load_json(load) if file_format == "json" else load()
        return dataset, notes
    except (datasets.exceptions.DatasetsError, ValueError, RecursionError, *_DAMAGED) as error:
        if "corresponds to no data" in str(error):  # the message of `datasets` for files without rows
            return None, notes
        refuse_datasets_cache(error)
        if wrong := _not_in(text.encoding, paths):
            likely = "utf-16" if _starts_as_utf16(wrong) else "latin-1"
            raise DataError(
                f"`{key}` must hold text in the encoding {text.encoding}, but `{wrong}` does not; save it as UTF-8, or"
                f" name its encoding in `data.encoding`, such as {likely}"
            ) from error
        fault = _json_fault(paths) if file_format == "json" else None
        raise DataError(
            f"`{key}` must hold {file_format}, but {fault or f'{where} cannot be read: {reason(error)}'}"
        ) from error


def _load_json(load: Callable[..., Any]) -> Dataset:
    """Return the rows of JSON files; messages with more than a role and a text keep their own keys and nulls.

    The reader takes the types of columns from the first 10 MB, and refuses later messages with other keys.
    """
    import datasets

    try:
        rows: Dataset = load()
        chats = chat_features(rows.features)
    except datasets.exceptions.DatasetsError:
        chats = chat_features(load(streaming=True).features or {}, of_any_keys=True)
        if not chats:
            raise
    if chats:
        rows = load(features=chats)
    rows.data.table.validate(full=True)  # the reader does not check the encoding
    return rows


def json_chats() -> Any:
    """Return the type of a column of chats whose messages keep their own keys."""
    import datasets

    return datasets.List(datasets.Json())


def chat_features(features: Mapping[str, Any], of_any_keys: bool = False) -> Features | None:
    """Return the types of columns, with messages as JSON; None if no column holds messages that need it.

    Arrow gives each object of a column the keys of all others. `datasets` would read a text such as "42" as a number if
    other texts of its column are lists.

    Args:
        features: the types of the columns.
        of_any_keys: whether messages of a role and a text need it too.
    """
    import datasets

    found = {}
    for name, feature in features.items():
        message = getattr(feature, "feature", None)
        if isinstance(message, Mapping) and "role" in message:
            texts = [getattr(message.get(key), "dtype", None) == "string" for key in message]
            if of_any_keys or not message.keys() <= {"role", "content"} or not all(texts):
                found[name] = json_chats()
    return datasets.Features({**features, **found}) if found else None


def _undecoded(features: Features | None) -> Features | None:
    """Return the features with images as bytes and paths."""
    import datasets

    if features is None:
        return None
    image = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    return datasets.Features(
        {name: image if isinstance(feature, datasets.Image) else feature for name, feature in features.items()}
    )


def _require_objects(paths: Sequence[Path], encoding: str, key: str, most_lines: int | None) -> None:
    """Refuse lines of `null` in JSON Lines: as the first row, one ends the process of the reader with a fault.

    Raises:
        DataError: there is such a line.
    """
    for path in paths:
        with open_text(path, encoding) as file:
            before = "}"
            for number, line in enumerate(itertools.islice(file, most_lines), start=1):
                row = line.strip("\ufeff \t\r\n")
                if row.startswith("["):
                    break  # a file of one list
                if row == "null" and before.endswith("}"):
                    raise DataError(
                        f"`{key}` must hold json, but line {number} of `{path}` is null, not a JSON object; remove the"
                        " line"
                    )
                before = row or before


def _require_names(path: Path, text: TextOptions, delimiter: str, key: str) -> None:
    """Require a name of its own for each column of a CSV file.

    pandas renames the second of two equal names, and moves all columns by one if the rows have one value more than
    there are names.

    Raises:
        DataError: two columns have one name, or the first row has more values than there are names.
    """
    with open_text(path, text.encoding) as file:
        rows = (cells for cells in text.cells(file, delimiter) if cells)
        names = [name.lstrip("\ufeff") for name in next(rows, [])]
        first: list[str] = next(rows, [])
    twice = sorted({name for name in names if names.count(name) > 1 and name.strip()})
    if twice:
        raise DataError(
            f"`{key}` must name files with a name of its own for each column, but `{path}` names `{twice[0]}` more than"
            " once; rename one"
        )
    if len(first) > len(names):
        raise DataError(
            f"`{key}` must name files with a name for each column, but `{path}` has {len(names)} names and {len(first)}"
            " values in its first row; add the missing name, or remove the delimiter at the end of the lines"
        )


def open_quotes_notes(rows: Dataset, places: RowPlaces, where: str) -> list[str]:
    """Return a note on a cell of a CSV file that looks like several rows, because a quotation mark in a text opened it.

    Args:
        rows: the rows.
        places: their places in the files.
        where: the name of the split in messages.

    Raises:
        DataError: a cell holds a line break and the tab that separates the columns.
    """
    import pyarrow.compute as pc

    if places.file_format != "csv" or not places.text.quotes or len(rows.features) < 2:
        return []
    delimiter = places.text.delimiter or delimiter_of(places.paths[0], places.text)
    for name, feature in rows.features.items():
        if "string" not in str(getattr(feature, "dtype", "")):
            continue
        column = rows.data.column(name)
        held = pc.and_(pc.match_substring(column, "\n"), pc.match_substring(column, delimiter))
        for row in pc.indices_nonzero(pc.fill_null(held, False)).to_pylist()[:_CELLS_LOOKED_AT]:
            lines = column[row].as_py().split("\n")[:-1]
            if delimiter == "\t":
                raise DataError(
                    f"column `{name}`, row {row + 1} of {where} holds a tab and a line break, because a quotation mark"
                    " opens a value and joins rows; set `data.quotes` to false if quotation marks are part of texts"
                )
            if any(line.count(delimiter) == len(rows.features) - 1 for line in lines):
                return [
                    f"column `{name}`, row {row + 1} of {where} holds lines that look like rows; set `data.quotes` to"
                    " false if quotation marks are part of texts"
                ]
    return []


def _read_excel(paths: Sequence[Path], key: str) -> Dataset | None:
    """Return the rows of the first sheet of each file; the first row holds the names of the columns."""
    import datasets
    import pandas

    try:
        import openpyxl  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"`{key}` names Excel files, which need openpyxl: pip install openpyxl; or save the sheet as CSV"
        ) from error
    frames = [pandas.read_excel(path, keep_default_na=False, na_values=[""]) for path in paths]
    frame = pandas.concat(frames, ignore_index=True)
    return datasets.Dataset.from_pandas(frame, preserve_index=False) if len(frame) else None


def _read_conll(paths: Sequence[Path], encoding: str) -> Dataset | None:
    import datasets

    rows: list[dict[str, list[str]]] = []
    for path in paths:
        with open_text(path, "utf-8-sig" if encoding == "utf-8" else encoding) as file:
            rows += conll_rows(file, f"`{path}`")
    return datasets.Dataset.from_list(rows) if rows else None


def open_text(path: Path, encoding: str) -> IO[str]:
    """Open a text file for reading, also one that gzip compressed."""
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rt", encoding=encoding, newline="")
    return path.open(encoding=encoding, newline="")


def delimiter_of(path: Path, text: TextOptions) -> str:
    """Return the delimiter that gives the same number of columns, and the most, in the first lines of a CSV file."""
    if _ending(path) in (".tsv", ".tab"):
        return "\t"
    with open_text(path, text.encoding) as file:
        lines = [line for _, line in zip(range(_SNIFFED_LINES), file, strict=False)]
    best, most = ",", 1
    for delimiter in _DELIMITERS:
        widths = [len(row) for row in text.cells(lines, delimiter) if row]
        if widths and widths[0] > most and widths[0] == widths[min(1, len(widths) - 1)]:
            best, most = delimiter, widths[0]
            if delimiter == ",":
                break
    return best


def _not_in(encoding: str, paths: Sequence[Path]) -> Path | None:
    """Return the first file that is not text in `encoding`; None if all are, or are no text files."""
    for path in paths:
        if _FORMAT_OF_ENDING.get(_ending(path), "json") not in ("json", "csv", "conll"):
            continue
        try:
            with open_text(path, encoding) as file:
                for _ in file:
                    pass
        except UnicodeError:
            return path
        except _DAMAGED:
            continue
    return None


def _starts_as_utf16(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) in _UTF16_MARKS


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError
    return value


def _json_fault(paths: Sequence[Path]) -> str | None:
    """Describe the first JSON fault; None if every line is an object or the file is a list, or it cannot be read."""
    for path in paths:
        try:
            with open_text(path, "utf-8") as file:
                text = file.read()
        except (UnicodeError, *_DAMAGED):
            return None
        lines = [text] if text.lstrip().startswith("[") else text.split("\n")  # a text may hold U+2028
        for number, line in enumerate(lines, start=1):
            try:
                value = json.loads(line, parse_float=_finite) if line.strip() else {}
            except json.JSONDecodeError as error:
                return f"line {number - 1 + error.lineno} of `{path}` is not JSON: {error.msg} at column {error.colno}"
            except (ValueError, RecursionError):
                place = f"line {number} of `{path}`" if len(lines) > 1 else f"`{path}`"
                return f"{place} has a number that is too large, or too many levels of lists and objects"
            if not isinstance(value, dict | list):
                return f"line {number} of `{path}` is not a JSON object"
    return None


@dataclass(frozen=True)
class RowPlaces:
    """The places of rows in text files, found again when a message needs one.

    Attributes:
        paths: the files, in order.
        file_format: their format.
        text: how they are read.
        chosen: the number of each row in the files, from 0; None: the rows are all rows of the files.
    """

    paths: tuple[Path, ...]
    file_format: Format
    text: TextOptions
    chosen: NDArray[np.int64] | None = None

    def of(self, row: int) -> str | None:
        """Return the place of a row, from 0: "line 7", or "line 7 of `a.csv`"; None if it is not of interest."""
        number = row if self.chosen is None else int(self.chosen[row])
        for path in self.paths:
            for line in self._first_lines(path):
                if number == 0:
                    where = f" of `{path.name}`" if len(self.paths) > 1 else ""
                    return f"line {line}{where}" if where or line != row + 1 else None
                number -= 1
        return None

    def _first_lines(self, path: Path) -> Iterator[int]:
        """Yield the first line of each row, from 1."""
        with open_text(path, self.text.encoding) as file:
            if self.file_format == "json":
                for number, line in enumerate(file, start=1):
                    if row := line.strip("\ufeff \t\r\n"):
                        if not row.startswith("{") or not row.endswith("}"):
                            return  # not JSON Lines
                        yield number
            elif self.file_format == "csv":
                rows = self.text.cells(file, self.text.delimiter or delimiter_of(path, self.text))
                is_header, last = True, 0
                for cells in rows:
                    if cells and not is_header:
                        yield last + 1
                    is_header, last = is_header and not cells, rows.line_num


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


def reason(error: BaseException) -> str:
    """Return the message of the first error in the chain, on one line: `datasets` wraps errors of its readers."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."
