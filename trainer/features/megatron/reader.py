"""The reader of Megatron's indexed data sets: token ids in `NAME.bin`, and their places in `NAME.idx`.

The format is that of `megatron.core.datasets.indexed_dataset`, version 1.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from trainer.base.errors import DataError
from trainer.data.formats.base import Files, Loaded, Reader

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, type, sequences, document boundaries
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class MegatronReader(Reader):
    """Token ids of Megatron: a row `input_ids` for each document."""

    is_text = False

    def load(self, files: Files) -> Loaded:
        import datasets

        parts = [datasets.Dataset(table) for path in files.paths if len(table := _table(path, files.most_rows))]
        return (datasets.concatenate_datasets(parts) if parts else None), []


def _table(path: Path, most_rows: int | None) -> Any:
    """Return the documents of a data set as a table of Arrow, which maps the file of tokens into memory."""
    import pyarrow

    index, tokens = path.with_suffix(".idx"), path.with_suffix(".bin")
    for file in (index, tokens):
        if not file.is_file():
            raise DataError(f"`{path}` must be an indexed data set of Megatron, but `{file}` does not exist; copy it")
    content = index.read_bytes()
    if len(content) < _HEADER.size or not content.startswith(_MAGIC):
        raise DataError(f"`{index}` must be an index of Megatron, but does not start as one; copy it again")
    _, version, code, num_sequences, num_bounds = _HEADER.unpack_from(content)
    if version != 1 or code not in _TYPES:
        raise DataError(f"`{index}` must be of version 1 with integers, but is of version {version} with type {code}")
    sizes = (4 * num_sequences, 8 * num_sequences, 8 * num_bounds)
    if len(content) < _HEADER.size + sum(sizes):
        raise DataError(f"`{index}` must hold {num_sequences:,} sequences, but ends earlier; copy it again")
    places = (_HEADER.size, _HEADER.size + sizes[0], _HEADER.size + sizes[0] + sizes[1])
    lengths = np.frombuffer(content, "<i4", num_sequences, places[0]).astype(np.int64)
    starts = np.frombuffer(content, "<i8", num_sequences, places[1])
    bounds = np.frombuffer(content, "<i8", num_bounds, places[2])
    kind, ends = np.dtype(_TYPES[code]), np.concatenate([[0], np.cumsum(lengths)])
    rising = np.concatenate([[0], bounds, [num_sequences]])  # Megatron writes 0 and the last one too
    if (
        not np.array_equal(starts, ends[:-1] * kind.itemsize)
        or (np.diff(ends) < 0).any()
        or (np.diff(rising) < 0).any()
    ):
        raise DataError(f"`{index}` must name sequences and documents in order, but does not; write the data set again")
    num_bytes = tokens.stat().st_size
    if num_bytes != ends[-1] * kind.itemsize:
        raise DataError(f"`{tokens}` must hold {ends[-1]:,} tokens, but has {num_bytes:,} bytes; copy both files again")
    # Rows are documents, which may have several sequences, so their bounds select the ends of sequences.
    offsets = ends[bounds[: None if most_rows is None else most_rows + 1]]
    values: Any = np.memmap(tokens, kind, "r") if num_bytes else np.zeros(0, kind)
    return pyarrow.table({"input_ids": pyarrow.LargeListArray.from_arrays(offsets, pyarrow.array(values))})
