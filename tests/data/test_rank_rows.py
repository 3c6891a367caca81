from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.rank_rows import partition, partition_by_tokens


@given(st.integers(1, 80), st.integers(1, 9), st.integers(1, 20))
def test_ranks_share_the_rows_once_in_equally_many_microbatches(num_rows, ranks, micro_batch_size):
    parts = [partition(num_rows, rank, ranks, micro_batch_size) for rank in range(ranks)]
    real = [chunk.places for part in parts for chunk in part if not chunk.filler]
    assert sorted(np.concatenate(real)) == list(range(num_rows))
    assert len({len(part) for part in parts}) == 1
    assert len(parts[0]) == math.ceil(math.ceil(num_rows / ranks) / micro_batch_size)
    for part in parts:
        sizes = [len(chunk.places) for chunk in part if not chunk.filler]
        assert all(1 <= size <= micro_batch_size for size in sizes)
        assert not sizes or max(sizes) - min(sizes) <= 1


def test_seven_rows_on_three_ranks():
    parts = [[(c.places.tolist(), c.filler) for c in partition(7, rank, 3, 2)] for rank in range(3)]
    assert parts == [
        [([0, 3], False), ([6], False)],
        [([1], False), ([4], False)],
        [([2], False), ([5], False)],
    ]


def test_one_row_on_two_ranks_leaves_a_filler():
    first, second = (partition(1, rank, 2, 8) for rank in range(2))
    assert [(c.places.tolist(), c.filler) for c in first] == [([0], False)]
    assert [(c.places.tolist(), c.filler) for c in second] == [([0], True)]


def test_a_filler_repeats_the_row_that_it_is_given():
    parts = partition(4, 2, 3, 1, filler_place=3)
    assert [(c.places.tolist(), c.filler) for c in parts] == [([2], False), ([3], True)]


def test_rows_sorted_by_length_are_balanced_over_ranks():
    lengths = np.sort(np.random.default_rng(0).integers(1, 500, 64))
    loads = [sum(lengths[c.places].sum() for c in partition(64, rank, 4, 4)) for rank in range(4)]
    assert max(loads) / min(loads) < 1.1


def area(widths: np.ndarray, packs: bool) -> int:
    """Return the tokens of a microbatch, with padding unless `packs`."""
    return int(widths.sum() if packs else len(widths) * widths.max(axis=0).sum())


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 20)), min_size=1, max_size=40),
    st.integers(1, 5),
    st.integers(60, 200),
    st.booleans(),
)
def test_microbatches_of_tokens_hold_each_row_once(rows, ranks, most, packs):
    widths = np.array(rows)
    parts = [partition_by_tokens(widths, rank, ranks, most, packs) for rank in range(ranks)]
    real = [chunk.places for part in parts for chunk in part if not chunk.filler]
    assert sorted(np.concatenate(real)) == list(range(len(rows)))
    assert len({len(part) for part in parts}) == 1
    assert all(area(widths[places], packs) <= most for places in real)
    # No more than rows of the greatest length would need.
    longest = int(widths.max(axis=0).sum())
    if longest <= most:
        assert len(parts[0]) <= math.ceil(math.ceil(len(rows) / ranks) / (most // longest))


@pytest.mark.parametrize("packs", [True, False])
def test_microbatches_of_tokens_have_about_equal_work(packs):
    widths = np.random.default_rng(0).integers(8, 129, (96, 1))
    parts = [partition_by_tokens(widths, rank, 3, 1024, packs) for rank in range(3)]
    work = np.array([[area(widths[chunk.places], packs) for chunk in part] for part in parts])
    per_rank = work.sum(axis=1)
    assert per_rank.max() / per_rank.min() < 1.05
    by_rows = np.array([widths[rank::3].sum() for rank in range(3)])
    assert per_rank.max() / per_rank.min() < by_rows.max() / by_rows.min()


def test_microbatches_of_tokens_fill_ranks_without_rows():
    parts = [partition_by_tokens(np.array([[5], [9]]), rank, 3, 9, padding_free=True) for rank in range(3)]
    assert [[(c.places.tolist(), c.filler) for c in part] for part in parts] == [
        [([1], False)],
        [([0], False)],
        [([0], True)],
    ]
