"""How the rows of one global batch are cut over data-parallel ranks, and those of a rank into microbatches."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from trainer.data.order import IndexArray


@dataclass(frozen=True)
class RowChunk:
    """The places, in the global batch, of the rows of one microbatch; a filler's row belongs to another chunk."""

    places: IndexArray
    filler: bool = False


def partition(
    num_rows: int, data_rank: int, data_parallel_size: int, micro_batch_size: int, filler_place: int = 0
) -> list[RowChunk]:
    """The microbatches of one rank, equally many on every rank.

    A rank takes every `data_parallel_size`-th place, which balances the ranks when places are sorted by length, and
    cuts its places into runs whose sizes differ by at most one. A rank with fewer rows than microbatches fills up with
    repetitions of `filler_place`.

    Args:
        num_rows: rows of the global batch, at least 1.
        data_rank: this rank, among `data_parallel_size`.
        data_parallel_size: the ranks that share the global batch.
        micro_batch_size: the most rows of one microbatch.
        filler_place: the row that fillers repeat.
    """
    places = np.arange(data_rank, num_rows, data_parallel_size)
    largest_share = math.ceil(num_rows / data_parallel_size)
    chunks = np.array_split(places, math.ceil(largest_share / micro_batch_size))
    return [RowChunk(chunk) if len(chunk) else RowChunk(np.array([filler_place]), filler=True) for chunk in chunks]
