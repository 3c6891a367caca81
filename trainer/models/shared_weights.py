"""Stored tensors that one rank of each node reads for all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.models.stored_weights import Index, StoredWeights

if TYPE_CHECKING:
    from trainer.parallel.node import NodeRanks

_CHUNK_BYTES = 1 << 23  # sent at once


class SharedWeights(StoredWeights):
    """Stored tensors that one rank of each node reads and sends to the others, in chunks of rows.

    Each byte is read once for a node, and sent in the type of the file. A rank holds a chunk beside its part. All ranks
    of the node must make the same calls, with the same keys.

    Raises:
        OSError, SafetensorError: a file is damaged; on every rank of the node.
    """

    def __init__(self, files: Sequence[str | Path], node: NodeRanks) -> None:
        self._node = node
        self._paths = files
        self._opened: StoredWeights | None = None  # of the reader

        # Only the reader of the node runs it; the others get shapes and names of types.
        def open_files() -> dict[str, tuple[tuple[int, ...], str]]:
            self._opened = opened = StoredWeights(files)
            return {
                key: (shape, str(opened.dtypes[key]).removeprefix("torch.")) for key, shape in opened.shapes.items()
            }

        described = node.read(open_files)
        self.shapes = {key: tuple(shape) for key, (shape, _) in described.items()}
        # Messages between ranks cannot hold types of torch, so these travel by name.
        self.dtypes = {key: getattr(torch, name) for key, (_, name) in described.items()}

    def again(self) -> StoredWeights:
        # A later read is of this rank alone: the others of the node may not need the same tensor.
        return StoredWeights(self._paths)

    def wanted(self, needed: Sequence[bool]) -> Sequence[bool]:
        return self._node.any_of(needed)

    def equal(self, key: str, other: str) -> bool:
        same: bool = self._node.read(lambda: self._reader.equal(key, other))
        return same

    @property
    def _reader(self) -> StoredWeights:
        assert self._opened is not None, "another rank reads"
        return self._opened

    def _copy(self, key: str, targets: Sequence[tuple[Index, Tensor]]) -> None:
        num_rows = self.shapes[key][0] if self.shapes[key] else 1
        for start, chunk in self._chunks(key):
            for index, target in targets:
                part, *columns = index or (slice(0, num_rows),)
                # The rows that both the chunk and the target have; perhaps none.
                first, last = max(part.start, start), min(part.stop, start + len(chunk))
                if first < last:
                    own_rows = (slice(first - start, last - start), *columns)
                    # `_chunks` yields a scalar as one row, so a scalar target needs that dimension too.
                    rows = target if target.dim() else target.view(1)
                    rows[first - part.start : last - part.start] = chunk[own_rows]

    def _chunks(self, key: str) -> Iterator[tuple[int, Tensor]]:
        """Yield the rows of a tensor in chunks, each with the index of its first row; a scalar is one row."""
        num_rows, *columns = self.shapes[key] or (1,)
        dtype = self.dtypes[key]
        # From shape and type alone, so that all ranks of the node agree on the chunks.
        step = max(1, _CHUNK_BYTES // max(1, torch.Size(columns).numel() * dtype.itemsize))
        for start in range(0, num_rows, step):
            stop = min(num_rows, start + step)
            read = partial(lambda *rows: self._reader.rows(key, *rows), start, stop)  # another rank has no reader
            yield start, self._node.read_tensor(read, (stop - start, *columns), dtype)
