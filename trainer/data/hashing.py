"""Hashes of rows, which are part of the keys of cache entries."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    from _typeshed import ReadableBuffer as Buffer
    from datasets import Dataset

ROWS_AT_ONCE = 10_000
_PLAIN = (str, int, float, list, dict)


def hash_rows(
    rows: Dataset, rows_at_once: int = ROWS_AT_ONCE, prepare: Callable[[pa.Table], pa.Table] | None = None
) -> str:
    """Return the hash of the content of rows, which does not depend on the names and dates of files.

    An edit in place changes the hash; a new download of the same content does not.

    Args:
        rows_at_once: the number of rows that are held in memory.
        prepare: replaces the names of files by their content.
    """
    import pyarrow as pa

    # The types too, because equal bytes of other types are other rows.
    sink = _HashSink(repr(rows.features))
    # As tables of Arrow, because Python objects of all rows take many times as long.
    batches = rows.with_format("arrow").iter(rows_at_once)
    with pa.PythonFile(sink, mode="w") as file:
        for batch in batches:
            # Metadata holds names of files and versions, which are no content.
            table = (prepare(batch) if prepare else batch).replace_schema_metadata(None)
            # The stream format writes the values, whatever slices and buffers hold them.
            with pa.ipc.new_stream(file, table.schema) as stream:
                stream.write_table(table)
    return sink.hexdigest()


def row_digest(row: Mapping[str, Any]) -> str:
    """Return a short hash of the texts, numbers and lists of a row, by which lists of rows know it again."""
    values = {name: value for name, value in row.items() if value is None or isinstance(value, _PLAIN)}
    text = json.dumps(values, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


class _HashSink(io.RawIOBase):
    """A writable file object that hashes its input and discards it."""

    def __init__(self, start: str) -> None:
        self._hash = hashlib.sha256(start.encode())

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer) -> int:
        self._hash.update(data)
        return memoryview(data).nbytes

    def hexdigest(self) -> str:
        return self._hash.hexdigest()
