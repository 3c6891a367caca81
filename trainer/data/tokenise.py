"""Tokenises a split once; ranks and concurrent runs share the result.

The cache is ours rather than that of `Dataset.map`, whose key pickles the function and whose writers race.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import tokenizers
import transformers
from filelock import FileLock

import trainer
from trainer.data.cache import CorruptEntryError, EntryWriter, open_entry
from trainer.data.sources import Split
from trainer.data.split import EncodedSplit
from trainer.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa
    from _typeshed import ReadableBuffer as Buffer
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

_ENTRY_VERSION = 1  # of the files of a cache entry; part of its key
_ROWS_AT_ONCE = 1000


class RowEncoder(Protocol):
    """What this room needs of a task; each member as in `trainer.tasks.task.Task`."""

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def fingerprint(self) -> str: ...

    def check_columns(self, features: Mapping[str, Any], where: str) -> None: ...

    def encode(
        self, rows: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int, where: str, first_row: int
    ) -> dict[str, list[Any]]: ...


def encode_split(
    split: Split, encoder: RowEncoder, tokenizer: PreTrainedTokenizerBase, max_length: int, cache: Path
) -> EncodedSplit:
    """The split as the model reads it: from the cache, or tokenised now and left there.

    Any number of processes may ask for it at once: one tokenises, the others wait.

    Args:
        split: the rows.
        encoder: the resolved task.
        tokenizer: that of the model.
        max_length: the most tokens of a row.
        cache: the folder of the cache; made if it is missing.

    Raises:
        DataError: a column is missing, or a value does not fit.
        UsageError: `max_length` does not fit the tokenizer, or the cache cannot be written.
    """
    _check_max_length(max_length, tokenizer)
    encoder.check_columns(split.rows.features, split.where)
    rows = split.rows.select_columns(list(encoder.columns))
    folder = cache / _key(rows, encoder, tokenizer, max_length)
    try:
        return open_entry(folder, verify=True)
    except (FileNotFoundError, CorruptEntryError):
        pass  # told again, and mended, by the one that holds the lock
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            return _open_or_write(folder, rows, split.where, encoder, tokenizer, max_length)
    except OSError as error:
        raise UsageError(
            f"`data.cache` must be a folder that can be written, but tokenised data cannot be kept in `{cache}`:"
            f" {error}; name another folder"
        ) from error


def _open_or_write(
    folder: Path, rows: Dataset, where: str, encoder: RowEncoder, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> EncodedSplit:
    try:
        return open_entry(folder, verify=True)
    except FileNotFoundError:
        pass
    except CorruptEntryError:
        shutil.rmtree(folder)
    with EntryWriter(folder) as writer:
        for first_row in range(0, len(rows), _ROWS_AT_ONCE):
            batch = rows.select(range(first_row, min(first_row + _ROWS_AT_ONCE, len(rows))))
            writer.add(encoder.encode(batch, tokenizer, max_length, where, first_row))
    return open_entry(folder)


def _check_max_length(max_length: int, tokenizer: PreTrainedTokenizerBase) -> None:
    longest = tokenizer.model_max_length
    if max_length > longest:
        raise UsageError(
            f"`data.max_length` must be at most the {longest} tokens that the tokenizer allows for its model, but is"
            f" {max_length}"
        )


def _key(rows: Dataset, encoder: RowEncoder, tokenizer: PreTrainedTokenizerBase, max_length: int) -> str:
    """Names an entry by everything that decides its content."""
    facts = {
        "entry": _ENTRY_VERSION,
        "rows": _hash_rows(rows),
        "task": encoder.fingerprint,
        "tokenizer": _hash_tokenizer(tokenizer),
        "max_length": max_length,
        "versions": [trainer.__version__, transformers.__version__, tokenizers.__version__],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _hash_rows(rows: Dataset) -> str:
    """The content itself, not the name or the age of a file: what was downloaded again or edited in place is told."""
    import pyarrow as pa

    sink = _HashSink(repr(rows.features))
    batches = rows.with_format("arrow").iter(10 * _ROWS_AT_ONCE)
    with pa.PythonFile(sink, mode="w") as file:
        for batch in batches:
            _write_stream(file, batch.replace_schema_metadata(None))
    return sink.hexdigest()


def _write_stream(file: pa.NativeFile, batch: pa.Table) -> None:
    import pyarrow as pa

    with pa.ipc.new_stream(file, batch.schema) as stream:
        stream.write_table(batch)


class _HashSink(io.RawIOBase):
    """A file to write to, of which only the hash is kept."""

    def __init__(self, start: str) -> None:
        self._hash = hashlib.sha256(start.encode())

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer) -> int:
        self._hash.update(data)
        return memoryview(data).nbytes

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def _hash_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    if tokenizer.is_fast:
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        for state in ("truncation", "padding"):  # left by earlier calls
            content.pop(state, None)
    else:
        content = [sorted(tokenizer.get_vocab().items()), repr(sorted(tokenizer.init_kwargs.items()))]
    facts = [type(tokenizer).__name__, content, tokenizer.model_input_names, tokenizer.truncation_side]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
