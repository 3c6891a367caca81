"""The rows of each window of a stream, a function of seed, epoch and number of the window only.

Shards are divided in blocks: consecutive parts with at least a sixteenth of the rows of a window. A pass over a source
reads its blocks in a shuffled order, and the rows of a block in theirs. A window is a run of rows in this order, of all
sources by their shares; its rows are shuffled after they were encoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trainer.base.errors import DataError
from trainer.data.order import IndexArray, permutation, shares_of_sources
from trainer.features.streams.index import ShardIndex

_BLOCKS_OF_WINDOW = 16
_OF_BLOCKS, _OF_ROWS = 1, 2  # the kinds of draws


@dataclass(frozen=True)
class Span:
    """Consecutive rows of a shard."""

    source: int
    shard: int  # among the shards of all sources
    start: int
    stop: int


class Windows:
    """The windows of all epochs.

    An epoch has as many rows as all sources together. Without weights, it has each row once. With weights, a source is
    read pass by pass, and an epoch goes on where the one before it stopped.

    Args:
        weights: the weight of each source; None: there is one source.
        size: the rows of a window; with weights, a window may have a few more or less.

    Attributes:
        counts: the rows of each source in an epoch.
        bounds: the rows of an epoch before each window, and all rows, of shape `[windows + 1]`.

    Raises:
        DataError: there is no row.
        UsageError: a weight is so small that an epoch has no row of its source.
    """

    def __init__(
        self, sources: Sequence[Sequence[ShardIndex]], weights: Sequence[float] | None, size: int, seed: int
    ) -> None:
        self._blocks: list[IndexArray] = []
        first = 0
        for shards in sources:
            self._blocks.append(_blocks(shards, first, max(1, size // _BLOCKS_OF_WINDOW)))
            first += len(shards)
        self.sizes = [int((blocks[:, 2] - blocks[:, 1]).sum()) for blocks in self._blocks]
        self.num_rows = sum(self.sizes)
        if not self.num_rows:
            raise DataError("`data.train` must hold at least one row, but its shards have none")
        self.counts = self.sizes if weights is None else shares_of_sources(self.sizes, weights)
        self._size, self._seed = size, seed
        ends = np.minimum(np.arange(-(-self.num_rows // size) + 1) * size, self.num_rows)
        # Python's integers, because end * count may overflow int64. The shares of all windows add up to `count`.
        self._of_sources = [[int(end) * count // self.num_rows for end in ends] for count in self.counts]
        self.bounds: IndexArray = np.sum(self._of_sources, axis=0, dtype=np.int64)
        self._passes: dict[int, tuple[int, IndexArray, IndexArray]] = {}

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def spans(self, epoch: int, window: int) -> Iterator[Span]:
        """Yield the rows of a window in the order in which they are read, source after source."""
        for source, (size, count) in enumerate(zip(self.sizes, self.counts, strict=True)):
            # Counted from the first epoch, because the passes over a source go on over the epochs.
            start, stop = (epoch * count + self._of_sources[source][window + end] for end in (0, 1))
            while start < stop:
                # The pass over the source, and the row in it.
                number, place = divmod(start, size)
                blocks, ends = self._pass(source, number)
                block = int(np.searchsorted(ends, place, side="right"))
                shard, _, last = blocks[block].tolist()
                # Both are ends of the block: `last` in its shard, `ends` in the pass.
                row = last - (int(ends[block]) - place)
                length = min(last - row, stop - start)
                yield Span(source, shard, row, row + length)
                start += length

    def row_order(self, epoch: int, window: int, num_rows: int) -> IndexArray:
        """Return the order of the encoded rows of a window, of shape `[num_rows]`."""
        return permutation(self._draws(_OF_ROWS, epoch, window), num_rows)

    def _pass(self, source: int, number: int) -> tuple[IndexArray, IndexArray]:
        """Return the blocks of a pass over a source in order, and the number of rows up to the end of each."""
        kept = self._passes.get(source)
        if kept is None or kept[0] != number:
            blocks = self._blocks[source]
            blocks = blocks[permutation(self._draws(_OF_BLOCKS, source, number), len(blocks))]
            kept = self._passes[source] = (number, blocks, np.cumsum(blocks[:, 2] - blocks[:, 1]))
        return kept[1:]

    def _draws(self, *kind: int) -> np.random.Philox:
        # Each draw has a key of its own, so a resumed run needs no state of a generator.
        return np.random.Philox(np.random.SeedSequence(self._seed, spawn_key=kind))


def _blocks(shards: Sequence[ShardIndex], first_shard: int, least: int) -> IndexArray:
    """Return the shard, the first row and the end of each block, of shape `[blocks, 3]`."""
    blocks: list[tuple[int, int, int]] = []
    for number, shard in enumerate(shards, start=first_shard):
        start = 0
        for end in shard.ends.tolist():
            # Small parts are joined, so that a window jumps between few places; a block never leaves its shard.
            if end - start >= least or end == shard.num_rows:
                blocks.append((number, start, end))
                start = end
    return np.array(blocks, np.int64).reshape(-1, 3)
