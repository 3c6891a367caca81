"""Partition of a global batch over data-parallel ranks, and of a rank's rows into microbatches."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from trainer.data.order import IndexArray


@dataclass(frozen=True)
class RowChunk:
    """The rows of one microbatch, as indices into the global batch; the row of a filler belongs to another chunk."""

    places: IndexArray
    filler: bool = False


def partition(
    num_rows: int, data_rank: int, data_parallel_size: int, micro_batch_size: int, filler_place: int = 0
) -> list[RowChunk]:
    """Return the microbatches of one rank; every rank has the same number.

    A rank takes every `data_parallel_size`-th place, which balances the ranks if places are sorted by length. It splits
    its places into runs with sizes that differ by at most one. A rank with fewer rows than microbatches adds fillers,
    which repeat `filler_place`.

    Args:
        num_rows: the number of rows of the global batch, at least 1.
        data_rank: the data-parallel rank.
        data_parallel_size: the number of ranks that share the global batch.
        micro_batch_size: the maximum number of rows of one microbatch.
        filler_place: the place of the row that fillers repeat.
    """
    places = np.arange(data_rank, num_rows, data_parallel_size)
    largest_share = math.ceil(num_rows / data_parallel_size)
    chunks = np.array_split(places, math.ceil(largest_share / micro_batch_size))
    return [RowChunk(chunk) if len(chunk) else RowChunk(np.array([filler_place]), filler=True) for chunk in chunks]
