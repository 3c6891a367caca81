"""Partition of a global batch over data-parallel ranks, and of a rank's rows into microbatches."""

from __future__ import annotations

import heapq
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
        filler_place: the place of the row that fillers repeat.
    """
    # Place r, r + N, ...: the union over the ranks is the global batch, whatever N is.
    places = np.arange(data_rank, num_rows, data_parallel_size)
    # Of the rank with the most rows, so that all ranks have equally many microbatches.
    largest_share = math.ceil(num_rows / data_parallel_size)
    return _filled(np.array_split(places, math.ceil(largest_share / micro_batch_size)), filler_place)


def partition_by_tokens(
    widths: IndexArray, data_rank: int, data_parallel_size: int, most_tokens: int, padding_free: bool
) -> list[RowChunk]:
    """Return the microbatches of one rank, with about equal tokens over all ranks and microbatches.

    Every rank has the same number, the smallest that was found. Without padding, each row in turn, the longest first,
    joins the microbatch with the fewest tokens (Graham 1969, doi:10.1137/0117039). With padding, a microbatch has rows
    of similar length, and the longest one decides its width. The shortest row fills missing microbatches.

    Args:
        widths: the tokens of each row of the global batch in each padded column, of shape `[rows, columns]`.
        most_tokens: the maximum number of tokens of one microbatch, at least those of the longest row.
        padding_free: whether layers process tokens without padding.
    """
    lengths = widths.sum(axis=1)
    # Stable, so that equal lengths have one order on every rank and machine.
    longest_first = np.argsort(-lengths, kind="stable")
    if padding_free:
        bins = _balanced(lengths, longest_first, data_parallel_size, most_tokens)
    else:
        bins = _runs(widths, longest_first, data_parallel_size, most_tokens)
    # The bins are sorted by tokens; each rank takes one in turn, and the order alternates.
    rounds = [bins[start : start + data_parallel_size] for start in range(0, len(bins), data_parallel_size)]
    of_rank = [(of_ranks if index % 2 == 0 else of_ranks[::-1])[data_rank] for index, of_ranks in enumerate(rounds)]
    return _filled([np.array(sorted(places), np.int64) for places in of_rank], int(longest_first[-1]))


def _filled(chunks: list[IndexArray], filler_place: int) -> list[RowChunk]:
    return [RowChunk(chunk) if len(chunk) else RowChunk(np.array([filler_place]), filler=True) for chunk in chunks]


def _balanced(lengths: IndexArray, order: IndexArray, multiple: int, most: int) -> list[list[int]]:
    """Return places in bins of at most `most` tokens, as many as a multiple; those with most tokens come first."""
    # The fewest bins that could hold all tokens; further bins are added until each fits.
    number = multiple * math.ceil(int(lengths.sum()) / (most * multiple))
    while True:
        # The index breaks ties of bins with equally many tokens in the same way on every rank.
        heap: list[tuple[int, int]] = [(0, index) for index in range(number)]
        bins: list[list[int]] = [[] for _ in range(number)]
        for place in order:
            tokens, index = heap[0]
            bins[index].append(int(place))
            heapq.heapreplace(heap, (tokens + int(lengths[place]), index))
        if max(heap)[0] <= most:
            return [bins[index] for _, index in sorted(heap, reverse=True)]
        number += multiple


def _runs(widths: IndexArray, order: IndexArray, multiple: int, most: int) -> list[list[int]]:
    """Return places in runs of `order` of at most `most` padded tokens, as many as a multiple, of about equal area."""
    rows = [[int(width) for width in widths[place]] for place in order]

    def cut(limit: int) -> list[tuple[int, int]]:
        """Return the area and the start of each run, if runs are as long as `limit` allows."""
        runs: list[tuple[int, int]] = []
        shape, count = [0] * len(rows[0]), 0
        for index, row in enumerate(rows):
            wider = [max(pair) for pair in zip(shape, row, strict=True)]
            if count and (count + 1) * sum(wider) <= limit:
                shape, count = wider, count + 1
                runs[-1] = (count * sum(shape), runs[-1][1])
            else:
                shape, count = row, 1
                runs.append((sum(row), index))
        return runs

    # A multiple of the ranks, or some would have a microbatch more.
    number = multiple * math.ceil(len(cut(most)) / multiple)
    # A longest row makes a run in any case, so a smaller limit than its tokens changes nothing.
    low, high = max(map(sum, rows)), most  # the smallest limit with at most `number` runs
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(cut(middle)) <= number else (middle + 1, high)
    runs = cut(high)
    ends = [start for _, start in runs[1:]] + [len(rows)]
    by_area = sorted(zip(runs, ends, strict=True), key=lambda run: -run[0][0])
    bins = [[int(place) for place in order[start:end]] for (_, start), end in by_area]
    return bins + [[] for _ in range(number - len(bins))]
