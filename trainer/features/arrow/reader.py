"""The reader of Arrow's file format, and of its streaming format, which `datasets` writes.

Both are the interprocess formats of Apache Arrow's columnar specification, version 1. Files are mapped into memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.base.errors import DataError
from trainer.data.formats.base import (
    Files,
    Loaded,
    Reader,
    Row,
    TextOptions,
    dataset_of,
    note_on_unread,
    readable,
    reason,
    require_own_names,
)

_ROWS_AT_ONCE = 1000


class ArrowReader(Reader):
    """Arrow."""

    is_text = False

    def load(self, files: Files) -> Loaded:
        """See `Reader`; columns of types that `datasets` lacks are left out, with a note."""
        import datasets

        parts, unread = [], dict[str, None]()
        for path in files.paths:
            table = _table(path, f"`{path}`")
            features = readable(table.schema)
            unread |= dict.fromkeys(f"`{one.name}` ({one.type})" for one in table.schema if one.name not in features)
            if rows := table.slice(0, files.most_rows):
                parts.append(dataset_of(rows.select(list(features)), features))
        return (datasets.concatenate_datasets(parts) if parts else None), note_on_unread(files.key, list(unread))

    def rows(self, path: Path, where: str, text: TextOptions) -> Iterator[Row | DataError]:
        for batch in _table(path, where).to_batches(_ROWS_AT_ONCE):
            yield from batch.to_pylist()


def _table(path: Path, where: str) -> Any:
    """Return the rows of a file, which is mapped into memory.

    Raises:
        DataError: it is damaged, or no file of Arrow.
    """
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as file:
            is_file = file.read(6) == b"ARROW1"
            file.seek(0)
            table = (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(file).read_all()
            # Of each value: a wrong offset would be read outside of the file.
            table.validate(full=True)
    except pyarrow.ArrowException as error:
        raise DataError(f"{where} must hold Arrow, but cannot be read: {reason(error)}; write it again") from error
    require_own_names(table.schema.names, where)
    return table
