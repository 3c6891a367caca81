from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.partition import partition


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
