"""Cache entries; an entry is the folder of one prepared split.

`meta.json` describes raw little-endian arrays, one file each: `offsets` and the columns. An entry is written next to
its final place and renamed, so it is complete or absent. Checksums detect later damage on the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from trainer.base.digests import code_digest, content_digest, digest_of
from trainer.base.disk import open_plain, read_plain, remove
from trainer.base.distribution import installed
from trainer.base.errors import UsageError, storage_error
from trainer.base.extensions import packages
from trainer.data.split import EncodedSplit, Encoder, Ragged

ENTRY_VERSION = 5  # version of the file format, part of the key of an entry
_LIBRARIES = (
    "transformers", "tokenizers", "jinja2", "sentencepiece", "tiktoken", "mistral-common", "pillow", "numpy"
)  # fmt: skip
"""The packages that prepare rows."""

_META = "meta.json"
_OFFSETS = "offsets"


class CorruptEntryError(Exception):
    """Error of a cache entry that is damaged and has to be written again."""


class EntryWriter:
    """Writer of an entry in parts, for splits that are larger than memory.

    The writer is a context manager. An exit without an error moves the entry to its place; an exit with an error
    removes the parts.

    Args:
        folder: the place of the entry, which must not exist. The writer removes the parts of an earlier writer that
            was killed, so the caller must hold the entry's lock.
        own_lengths: the names of columns with lengths of their own.
    """

    def __init__(self, folder: Path, own_lengths: Sequence[str] = ()) -> None:
        self._folder = folder
        self._own_lengths = own_lengths
        self._texts_per_row = 1
        self._partial = folder.with_name(f"{folder.name}.partial")
        self._arrays: dict[str, _ArrayFile] = {}
        self._num_cut = self._num_cut_targets = 0
        self._num_tokens = 0
        self._num_ragged: dict[str, int] = {}
        self._num_texts = 0
        self._ends: list[int] = []  # of the sources, in texts

    def __enter__(self) -> EntryWriter:
        # The lock of the entry is held, so nobody else writes there.
        remove(self._partial)
        self._partial.mkdir(parents=True)
        # Offsets begin with 0, so row i lies between offsets i and i + 1.
        self._append(_OFFSETS, "offsets", np.zeros(1, np.int64))
        return self

    def add(self, features: Mapping[str, list[Any]]) -> None:
        """Append rows in the form that a task's `encode` returns; perhaps none."""
        if not any(features.values()):
            return
        # A copy, because columns are taken out of it below, and the argument belongs to the caller.
        columns = dict(features)
        self._num_cut += sum(columns.pop("cut", ()))
        self._num_cut_targets += sum(columns.pop("cut_target", ()))
        for name in self._own_lengths:
            if name in columns:  # rows to predict have no labels
                self._append_ragged(name, columns.pop(name))
        ids = columns.get("input_ids")
        if ids and isinstance(ids[0][0], list):
            self._texts_per_row = len(ids[0])
            for name, values in columns.items():
                if isinstance(values[0], list) and isinstance(values[0][0], list):
                    assert set(map(len, values)) == {self._texts_per_row}, "rows have one number of texts"
                    # The texts of a row follow each other; `texts_per_row` finds them again.
                    columns[name] = list(chain.from_iterable(values))
        # Rows without tokens have length 0.
        token_ids = columns.get("input_ids", [()] * len(columns[next(iter(columns), "labels")]))
        lengths = np.fromiter(map(len, token_ids), np.int64)
        self._append(_OFFSETS, "offsets", self._num_tokens + np.cumsum(lengths))
        num_tokens = int(lengths.sum())
        self._num_tokens += num_tokens
        self._num_texts += len(lengths)
        for name, values in columns.items():
            if isinstance(values[0], list):
                # int32 holds every token id, in half of the bytes of int64 on the disk and in mapped pages.
                flat = np.fromiter(chain.from_iterable(values), np.int32)
                assert len(flat) == num_tokens, f"column {name} does not run along with input_ids"
                self._append(name, "tokens", flat)
            elif isinstance(values[0], np.ndarray):
                self._append(name, "arrays", np.stack(values))
            else:
                self._append(
                    name, "scalars", np.array(values, np.float32 if isinstance(values[0], float) else np.int64)
                )

    def end_source(self) -> None:
        """Note that the next rows are of another source of a mixture."""
        self._ends.append(self._num_texts)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        arrays = {name: array.close() for name, array in self._arrays.items()}
        if kind is not None:
            shutil.rmtree(self._partial, ignore_errors=True)
            return
        sources = [int(count) // self._texts_per_row for count in np.diff(self._ends, prepend=0)]
        meta = {
            "num_cut": self._num_cut,
            "num_cut_targets": self._num_cut_targets,
            "texts_per_row": self._texts_per_row,
            "sources": sources,
            "content_hash": _digest(arrays, sources),
            "arrays": arrays,
        }
        (self._partial / _META).write_text(json.dumps(meta, indent=1))
        # A rename is atomic: other processes see the whole entry or none.
        self._partial.rename(self._folder)

    def _append_ragged(self, name: str, values: Sequence[Sequence[int]]) -> None:
        lengths = np.array([len(row) for row in values], np.int64)
        ends = f"{_OFFSETS}.{name}"
        if name not in self._arrays:
            self._append(ends, "ragged_offsets", np.zeros(1, np.int64))
            self._num_ragged[name] = 0
        self._append(ends, "ragged_offsets", self._num_ragged[name] + np.cumsum(lengths))
        self._append(name, "ragged", np.fromiter(chain.from_iterable(values), np.int32))
        self._num_ragged[name] += int(lengths.sum())

    def _append(self, name: str, role: str, values: NDArray[Any]) -> None:
        if name not in self._arrays:
            self._arrays[name] = _ArrayFile(self._partial / name, role, values.dtype, values.shape[1:])
        self._arrays[name].append(values)


class _ArrayFile:
    def __init__(self, path: Path, role: str, dtype: np.dtype[Any], row_shape: tuple[int, ...]) -> None:
        self._role = role
        self._row_shape = row_shape
        self._dtype = dtype.newbyteorder("<")
        self._num_values = 0
        self._hash = hashlib.sha256()
        self._file: IO[bytes] = path.open("wb")

    def append(self, values: NDArray[Any]) -> None:
        assert values.shape[1:] == self._row_shape, "rows of one column have one shape"
        # Little-endian on every machine; "equiv" changes the order of bytes only.
        raw = values.astype(self._dtype, casting="equiv").tobytes()
        self._num_values += values.size
        self._hash.update(raw)
        self._file.write(raw)

    def close(self) -> dict[str, Any]:
        self._file.close()
        return {
            "role": self._role,
            "dtype": self._dtype.str,
            "row_shape": list(self._row_shape),
            "num_values": self._num_values,
            "sha256": self._hash.hexdigest(),
        }


def entry_key(encoder: Encoder, libraries: Sequence[str] = _LIBRARIES, **facts: Any) -> str:
    """Return the key of an entry, which covers everything that determines its content.

    Args:
        libraries: the packages that prepare rows, installed or not.
        facts: the digests of all inputs, by name.
    """
    everything = {
        **facts,
        "entry": ENTRY_VERSION,
        "task": [type(encoder), encoder.fingerprint],
        # A change of the encoder's source makes new entries.
        "code": code_digest(type(encoder)),
        "versions": {library: installed(library) for library in libraries},
        "python": platform.python_version(),  # its tables of Unicode characters
        "extensions": packages(),
    }
    return digest_of(everything)[:32]


def open_entry(folder: Path, verify: bool = False) -> EncodedSplit:
    """Map an entry into memory.

    Args:
        verify: whether to read every byte and compare the checksums (about 1 GB per second).

    Raises:
        FileNotFoundError: the entry does not exist.
        CorruptEntryError: the entry is damaged.
    """
    if not folder.exists():
        raise FileNotFoundError(folder)
    try:
        meta = json.loads(read_plain(folder / _META))
        if any("/" in name for name in meta["arrays"]):
            raise CorruptEntryError(f"{folder / _META} names files of other folders")
        arrays = {name: _map_array(folder / name, array, verify) for name, array in meta["arrays"].items()}
        if meta["content_hash"] != _digest(meta["arrays"], meta["sources"]):
            raise CorruptEntryError(f"{folder / _META} was changed")
        columns = {
            role: {name: arrays[name] for name, array in meta["arrays"].items() if array["role"] == role}
            for role in ("tokens", "scalars", "arrays", "ragged")
        }
        return EncodedSplit(
            arrays[_OFFSETS],
            columns["tokens"],
            columns["scalars"],
            meta["content_hash"],
            meta["num_cut"],
            partial(open_entry, folder),
            columns["arrays"],
            {name: Ragged(arrays[f"{_OFFSETS}.{name}"], values) for name, values in columns["ragged"].items()},
            meta["texts_per_row"],
            meta["num_cut_targets"],
            tuple(meta["sources"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CorruptEntryError(f"{folder}: {error}") from error


def open_or_write(
    cache: Path,
    key: str,
    write: Callable[[EntryWriter], None],
    own_lengths: Sequence[str] = (),
    lock: str | None = None,
) -> EncodedSplit:
    """Return the entry `key` of a cache; write it first if it is missing or damaged.

    Any number of processes may call this function at once: one writes the entry, and the others wait.

    Args:
        key: the key of the entry, which covers everything that determines its content.
        own_lengths: the names of columns with lengths of their own.
        lock: the name of a lock that entries share; None: the entry has its own.

    Raises:
        UsageError: the cache cannot be written.
        TrainerError: the disk is full.
    """
    folder = cache / key
    try:
        return open_entry(folder, verify=True)
    except (FileNotFoundError, CorruptEntryError):
        pass  # the holder of the lock checks the entry again and writes it
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # The ranks of a node, and other runs, wait for the one that writes.
        with FileLock(cache / f"{lock or key}.lock"):
            return _open_or_write(folder, write, own_lengths)
    except OSError as error:
        raise storage_error(
            f"`data.cache` must be a folder that can be written, but prepared data cannot be kept in `{cache}`:"
            f" {error}; make room or name another folder",
            error,
        ) from error


def _open_or_write(folder: Path, write: Callable[[EntryWriter], None], own_lengths: Sequence[str]) -> EncodedSplit:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        kind = "a link" if folder.is_symlink() else "a file"
        raise UsageError(f"an entry of `data.cache` must be a folder, but `{folder}` is {kind}; remove it")
    try:
        return open_entry(folder, verify=True)
    except FileNotFoundError:
        pass
    except CorruptEntryError:
        # Other processes may have mapped the files; removed files keep their pages until they are unmapped.
        shutil.rmtree(folder)
    # Checked again above: another process may have written the entry while this one waited.
    with EntryWriter(folder, own_lengths) as writer:
        write(writer)
    # Without `verify`, because this process has written and hashed these bytes just now.
    return open_entry(folder)


def _map_array(path: Path, array: Mapping[str, Any], verify: bool) -> NDArray[Any]:
    dtype = np.dtype(array["dtype"])
    # One open file: another run may put a new one in the place of a damaged one meanwhile.
    with open(open_plain(path, os.O_RDONLY), "rb") as file:
        if os.fstat(file.fileno()).st_size != dtype.itemsize * array["num_values"]:
            raise CorruptEntryError(f"{path} does not have the size that was written")
        values = np.memmap(file, dtype, mode="r") if array["num_values"] else np.empty(0, dtype)
        if verify and content_digest(file) != array["sha256"]:
            raise CorruptEntryError(f"{path} does not hold the bytes that were written")
    # Indexing a plain array over the same pages is faster than indexing the subclass.
    return np.asarray(values).reshape(-1, *array["row_shape"])


def _digest(arrays: Mapping[str, Any], sources: Sequence[int]) -> str:
    described = {"arrays": arrays, "sources": sources} if sources else arrays
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
