"""The base of the readers of files: text, gzip, and the loader of `datasets`."""

from __future__ import annotations

import codecs
import functools
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from filelock import FileLock

from trainer.base.digests import digest_of
from trainer.base.errors import DataError
from trainer.base.text import listed, size

if TYPE_CHECKING:
    import pyarrow
    from datasets import Dataset, Features

_MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"} | {
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_WIDE: Mapping[tuple[bool, ...], str] = {
    (False, True, False, True): "utf-16-le",
    (True, False, True, False): "utf-16-be",
    (False, True, True, True): "utf-32-le",
    (True, True, True, False): "utf-32-be",
}
"""The encodings by the bytes of each four that may be zero: those of Latin letters, digits and delimiters are."""
_LOOKED_AT_BYTES, _LEAST_ZEROS = 4096, 0.02
Result = TypeVar("Result")
Row: TypeAlias = dict[str, Any]
Loaded: TypeAlias = "tuple[Dataset | None, list[str]]"
CellKind: TypeAlias = Literal["text", "class"]
"""The reading of a column that a task or a map reads as texts, or as classes; other columns may hold numbers."""
NULLS: Mapping[str, Any] = {"keep_default_na": False, "na_values": [""]}
"""The options of pandas for null: "None" and "NA" may be names of classes."""
DAMAGED = (OSError, EOFError, zlib.error)
"""Errors of files that cannot be read or unpacked."""
_PART_BYTES = 1 << 20
_MOST_OF_GZIP = 1032  # times its bytes, the most that deflate can unpack
_MOST_TIMES, _FREE_BYTES = 200, 1 << 30
"""Rows may have so many times the bytes of a compressed file, and so many in any case; text has 20 times at most."""
_UNREAD_SHOWN = 6
_LONGEST_REASON = 400  # maximum length of a reader's message, in characters


@dataclass(frozen=True)
class TextOptions:
    """How files are read that hold texts.

    Attributes:
        delimiter: the delimiter of CSV files; None: found in each file's first lines.
        quotes: whether quotation marks enclose values of CSV files; otherwise they are text.
        further: the values of keys of `data` that files of one format alone have.
    """

    encoding: str = "utf-8"
    delimiter: str | None = None
    quotes: bool = True
    further: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Files:
    """Files of one format, and how they are read.

    Attributes:
        most_rows: the number of rows to read; None: all.
    """

    paths: Sequence[Path]
    text: TextOptions
    key: str
    most_rows: int | None = None


class Reader:
    """The reader of one format: of whole files to train, of row after row to predict."""

    is_text = True

    def load(self, files: Files) -> Loaded:
        """Return the rows of files, or None without a row, and notes for the user.

        Raises:
            DataError, DatasetsError, OSError, ValueError: a file has the wrong format or encoding.
            UsageError: a package for the format is missing.
        """
        raise NotImplementedError

    def typed(self, parts: Sequence[Dataset], kinds: Mapping[str, CellKind]) -> list[Dataset]:
        """Return the rows of `load` with the types of their columns, which are the same in all parts.

        Args:
            kinds: the kinds of columns that a task or a map reads.
        """
        return list(parts)

    def notes(self, rows: Dataset, path: Path, text: TextOptions, where: str) -> list[str]:
        """Return notes on loaded rows that look wrong.

        Raises:
            DataError: rows are wrong.
        """
        return []

    def rows(self, path: Path, where: str, text: TextOptions) -> Iterator[Row | DataError]:
        """Yield the rows of a file, or the error of a bad one; `where` is the name of the file in messages.

        Raises:
            DataError, OSError, ValueError: the file cannot be read.
        """
        raise NotImplementedError

    def write(
        self, parts: Sequence[Path], path: Path, source: Path | None = None, escapes_formulas: bool = False
    ) -> None:
        """Write the rows of JSON Lines files into one file.

        Args:
            source: the file with the rows from which these were made, one for each; a format with types keeps those of
                a source in the same format. None: there is none.
            escapes_formulas: whether texts that a spreadsheet takes for formulas get an apostrophe.

        Raises:
            DataError: the format cannot hold the rows.
            OSError: the file cannot be written.
        """
        raise NotImplementedError

    def bound_bytes(self, path: Path) -> float:
        """Return an upper bound of the unpacked bytes that costs little; zero for a file that is not compressed.

        Raises:
            OSError, ValueError: the file is damaged.
        """
        return _MOST_OF_GZIP * path.stat().st_size if path.name.lower().endswith(".gz") else 0

    def unpacked_bytes(self, path: Path) -> Iterator[int]:
        """Yield the bytes of each part of a compressed file, which is read in parts; nothing for others.

        Raises:
            OSError, EOFError, zlib.error: the file is damaged.
        """
        if path.name.lower().endswith(".gz"):
            with gzip.open(path) as file:
                while part := file.read(_PART_BYTES):
                    yield len(part)

    def num_empty(self, path: Path, text: TextOptions) -> int:
        """Return the number of empty lines that `rows` skips."""
        return 0

    def first_lines(self, path: Path, text: TextOptions) -> Iterator[int]:
        """Yield the first line of each row, from 1; nothing if rows have no lines."""
        return iter(())

    def fault(self, files: Files) -> str | None:
        """Describe the first fault of files that could not be loaded, with its place; None: it is not found."""
        return None


def require_bounded(reader: Reader, path: Path, key: str) -> None:
    """Refuse a compressed file that unpacks to far more bytes than rows have; they would fill memory or disk.

    Raises:
        DataError: it does so.
    """
    num_bytes = path.stat().st_size
    most, unpacked = max(_FREE_BYTES, _MOST_TIMES * num_bytes), 0
    with suppress(ValueError, *DAMAGED):  # the reader names the damage
        # The bound costs little, and spares most files the unpacking.
        if reader.bound_bytes(path) <= most:
            return
        for part in reader.unpacked_bytes(path):
            unpacked += part
            if unpacked > most:
                raise DataError(
                    f"{key} must hold at most {_MOST_TIMES} times the bytes of a compressed file, but `{path}` of"
                    f" {size(num_bytes)} unpacks to more than {size(most)}; if these rows are meant, write them as JSON"
                    " Lines without compression"
                )


def load_with_datasets(
    name: str, files: Files, load_all: Callable[[Callable[..., Any]], Dataset] | None = None, **options: Any
) -> Dataset | None:
    """Return the rows that a reader of `datasets` finds.

    Args:
        load_all: loads all rows by the function that it gets; None: calls it.
    """
    import datasets

    data_files = [str(path.absolute()) for path in files.paths]
    # Its cache knows a file by path and `mtime`, and `cp -p` and `tar` give another file the same `mtime`.
    stats = [path.stat() for path in files.paths]
    # `ctime` changes with any write of the file, and a program cannot set it.
    stamp = digest_of([(stat.st_size, stat.st_ctime_ns) for stat in stats])[:16]
    lock = Path(datasets.config.HF_DATASETS_CACHE) / f"trainer-{stamp}.lock"

    def load(**more: Any) -> Any:
        read = functools.partial(
            datasets.load_dataset, name, stamp, split="train", data_files=data_files, **options, **more
        )

        def again() -> Any:
            lock.parent.mkdir(parents=True, exist_ok=True)
            # The first of them repairs the cache; the others then find it whole.
            with FileLock(lock):  # of several ranks, one writes it
                return or_again(read, lambda: read(download_mode="force_redownload"))

        return or_again(read, again)

    if files.most_rows is None:
        dataset: Dataset = load_all(load) if load_all else load()
        return dataset
    # A stream ends after the rows that are needed, and prepares no cache of a whole file.
    rows = load(streaming=True)
    if chats := chat_features(rows.features or {}):
        rows = load(streaming=True, features=chats)
    # `datasets` would open the files that rows name, even if a row has the bytes of its image.
    first = list(rows.decode(False).take(files.most_rows))
    return datasets.Dataset.from_list(first, features=_undecoded(rows.features)) if first else None


def or_again(read: Callable[[], Result], again: Callable[[], Result]) -> Result:
    """Return the result of `read`, or that of `again` if a file in the cache of `datasets` is damaged."""
    from pyarrow import ArrowInvalid

    try:
        return read()
    except (OSError, ArrowInvalid) as error:
        if getattr(error, "errno", None) is not None:  # of the file system; those of Arrow have no number
            raise
        return again()


def json_chats() -> Any:
    """Return the type of a column of chats in which each message has its own keys."""
    import datasets

    return datasets.List(datasets.Json())


def is_chat(value: Any) -> bool:
    """Return whether a value of a row is a list of messages."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]


def chat_features(features: Mapping[str, Any], of_any_keys: bool = False) -> Features | None:
    """Return the types of columns, with messages and tools as JSON; None if no column holds any that need it.

    Arrow gives each object of a column the keys of all others. `datasets` would read a text such as "42" as a number if
    other texts of its column are lists.

    Args:
        of_any_keys: whether messages of a role and a text need it too.
    """
    import datasets

    chats = {}
    for name, feature in features.items():
        message = getattr(feature, "feature", None)
        if not isinstance(message, Mapping):
            continue
        texts = [getattr(message.get(key), "dtype", None) == "string" for key in message]
        is_chat = any(keys <= message.keys() for keys in ({"role"}, {"from", "value"}))
        is_plain = message.keys() in ({"role", "content"}, {"from", "value"}) and all(texts)
        if message.keys() & {"function", "parameters"} or (is_chat and (of_any_keys or not is_plain)):
            chats[name] = json_chats()
    return datasets.Features({**features, **chats}) if chats else None


def readable(schema: pyarrow.Schema) -> Features:
    """Return the types of the columns that `datasets` can read, with views of texts as texts."""
    import datasets
    import pyarrow

    columns = {}
    for column in schema:
        with suppress(ValueError):  # a map, a view of a list, or a type of another package
            # Column by column, because one unknown type makes `datasets` refuse a whole schema.
            single = pyarrow.schema([column], schema.metadata)
            columns[column.name] = _without_views(datasets.Features.from_arrow_schema(single)[column.name])
    return datasets.Features(columns)


def note_on_unread(key: str, columns: Sequence[str]) -> list[str]:
    """Return a note on columns that `readable` leaves out, if there are any."""
    note = f"columns of `{key}` with types that are not read: {listed(columns, _UNREAD_SHOWN)}"
    return [note] if columns else []


def dataset_of(table: pyarrow.Table, features: Mapping[str, Any]) -> Dataset:
    """Return a table as rows; its columns get their types among `features`, if `datasets` would take others."""
    from datasets import Dataset, Features
    from datasets.table import InMemoryTable, table_cast

    kinds = Features({name: features[name] for name in table.column_names})
    differs = Features.from_arrow_schema(table.schema) != kinds
    return Dataset(InMemoryTable(table_cast(table, kinds.arrow_schema) if differs else table))


def _without_views(feature: Any) -> Any:
    """Return a type with texts and binary values as tasks read them, instead of views of them."""
    import datasets

    if isinstance(feature, dict):
        return {key: _without_views(inner) for key, inner in feature.items()}
    if isinstance(feature, datasets.List | datasets.LargeList):
        return replace(feature, feature=_without_views(feature.feature))
    dtype = str(getattr(feature, "dtype", ""))
    return datasets.Value(dtype.removesuffix("_view")) if dtype in ("string_view", "binary_view") else feature


def _undecoded(features: Features | None) -> Features | None:
    """Return the features with images as bytes and paths."""
    import datasets

    if features is None:
        return None
    image = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    return datasets.Features(
        {name: image if isinstance(feature, datasets.Image) else feature for name, feature in features.items()}
    )


def open_text(path: Path, encoding: str) -> IO[str]:
    """Open a text file for reading, also one that gzip compressed; the mark before UTF-8 is left out."""
    encoding = "utf-8-sig" if encoding == "utf-8" else encoding
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rt", encoding=encoding, newline="")
    # As `csv` asks: without translation, line breaks inside of quoted values stay as they are.
    return path.open(encoding=encoding, newline="")


def open_bytes(path: Path) -> gzip.GzipFile | io.BufferedReader:
    """Open a file for reading, also one that gzip compressed."""
    return gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb")


def wide_encoding(path: Path) -> str | None:
    """Return UTF-16 or UTF-32 if a file begins so, by its mark or by the places of zero bytes; None: it does not.

    Raises:
        OSError, EOFError, zlib.error: the file cannot be read.
    """
    with open_bytes(path) as file:
        start = file.read(_LOOKED_AT_BYTES)
    for mark, name in _MARKS.items():
        if start.startswith(mark):
            return name
    # Some zeros may stand in other places: letters beyond Latin have none.
    least = len(start) // 4 * _LEAST_ZEROS
    zeros = tuple(start[place::4].count(0) > least for place in range(4))
    return _WIDE.get(zeros)


def ending(path: Path) -> str:
    """Return the ending in small letters, without `.gz`."""
    name = path.name.lower()
    return Path(name.removesuffix(".gz")).suffix


def rows_of_part(part: Path) -> Iterator[Row]:
    """Yield the rows of a file of JSON Lines that this program wrote."""
    with part.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def require_own_names(names: Sequence[str], where: str) -> None:
    """Refuse two columns of one name.

    Raises:
        DataError: there are such columns.
    """
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(
            f"{where} must have a name of its own for each column, but names `{twice[0]}` more than once; rename one"
        )


def other_columns(names: Sequence[str], first: Sequence[str]) -> str | None:
    """Return the problem of rows with other columns than the first ones; None: they have the same."""
    more = [f"`{name}` is new" for name in sorted({*names} - {*first})]
    fewer = [f"`{name}` is missing" for name in sorted({*first} - {*names})]
    return f"later rows have other columns than the first: {listed([*more, *fewer], 6)}" if more or fewer else None


def reason(error: BaseException) -> str:
    """Return the message of the first error in the chain, on one line: `datasets` wraps errors of its readers."""
    from datasets.table import CastError

    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, CastError) and (
        problem := other_columns(error.table_column_names, error.requested_column_names)
    ):
        return problem
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."


def leaves(column: Any) -> Iterator[Any]:
    """Yield the columns of values within a column of lists or objects."""
    import pyarrow

    if pyarrow.types.is_struct(column.type):
        yield from (leaf for inner in column.flatten() for leaf in leaves(inner))
    elif pyarrow.types.is_list(column.type):
        yield from leaves(column.flatten())
    else:
        yield column
