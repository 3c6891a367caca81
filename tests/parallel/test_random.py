"""Masks must be a pure function of their coordinates, and must look random along each of them."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from trainer.parallel.random import (
    derive_keys,
    element_keys,
    keep_mask,
    quantised,
    row_keys,
    stream_key,
    stream_keys,
)

ROWS = torch.arange(64)


def mask(
    probability: float = 0.1, seed: int = 1, step: int = 0, site: str = "a", rows: Tensor = ROWS, size: int = 4096
) -> Tensor:
    return keep_mask(row_keys(stream_key(seed, step, site), rows), size, probability)


def correlation_z(one: Tensor, other: Tensor) -> float:
    """Standard normal under independence: the correlation of two masks times the root of their number of elements."""
    pair = torch.stack([one.flatten().double(), other.flatten().double()])
    return torch.corrcoef(pair)[0, 1].item() * math.sqrt(one.numel())


class TestStreamKey:
    @pytest.mark.parametrize(
        ("parts", "key"),
        [
            ((0,), 7163381271710615482),
            ((42, 0, "bert.embeddings.dropout", 0), 5852584906591848580),
            ((2**63 - 1, "x"), 5633031829991125437),
        ],
    )
    def test_is_the_same_in_every_version(self, parts, key):
        """A changed value breaks every checkpoint: the resumed half would draw other masks."""
        assert stream_key(*parts) == key

    def test_of_several_streams_equals_each_stream(self):
        rest = [("a", 0), ("a", 1), ("b.c", 0), ()]
        assert stream_keys((7, 3), rest) == [stream_key(7, 3, *parts) for parts in rest]

    def test_differs_for_different_parts(self):
        parts = [(1, 23), (12, 3), ("1", 23), (123,), ("1", "23"), ("1\x0023",), (1, 2, 3), (-1, 23)]
        assert len({stream_key(*part) for part in parts}) == len(parts)

    def test_fits_an_int64(self):
        keys = [stream_key(index) for index in range(1000)]
        assert all(-(2**63) <= key < 2**63 for key in keys)
        assert 400 < sum(key < 0 for key in keys) < 600


class TestGolden:
    def test_words_equal_splitmix64(self):
        """The first outputs of the published generator with seed 1234567, its counter read at 1, 2, 3."""
        published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
        words = derive_keys(torch.tensor(1234567), torch.tensor([1, 2, 3])).tolist()
        assert [word % 2**64 for word in words] == published

    def test_a_mask_is_the_same_in_every_version(self):
        bits = mask(0.5, seed=42, site="golden", rows=torch.tensor([3]), size=64).flatten().tolist()
        assert "".join(map(str, bits)) == "0110100110011100110100000110001100001101010100011111011101111011"


class TestDistribution:
    @pytest.mark.parametrize("probability", [0.0, 1e-4, 0.1, 0.25, 0.5, 0.9, 0.999])
    def test_share_dropped(self, probability):
        kept = mask(probability, size=1 << 14)
        p = quantised(probability)
        deviation = math.sqrt(p * (1 - p) / kept.numel())
        assert abs((1 - kept.double().mean().item()) - p) <= 5 * deviation

    def test_the_share_is_quantised_to_the_nearest_of_65536(self):
        assert quantised(0.1) == round(6553.6) / 65536
        assert quantised(1e-6) == 0.0
        assert mask(1e-6).all()

    def test_a_share_of_nearly_one_still_keeps_something(self):
        assert quantised(1 - 1e-12) == 65535 / 65536
        assert 0 < mask(1 - 1e-12, size=1 << 16).sum() < 200

    def test_lanes_of_a_word_have_all_four_bits_patterns_equally_often(self):
        """16 patterns of the four elements that one word serves."""
        lanes = mask(0.5).reshape(-1, 4).long()
        counts = torch.bincount(lanes @ torch.tensor([1, 2, 4, 8]), minlength=16)
        assert stats.chisquare(counts.numpy()).pvalue > 1e-4

    def test_every_lane_drops_its_share(self):
        dropped = (mask(0.1) == 0).reshape(-1, 4).sum(0)
        p, trials = quantised(0.1), mask().numel() // 4
        statistic = sum((count.item() - trials * p) ** 2 / (trials * p * (1 - p)) for count in dropped)
        assert stats.chi2.sf(statistic, 4) > 1e-4

    def test_runs_of_kept_elements_have_the_length_of_independent_ones(self):
        """Wald-Wolfowitz: the number of changes along a row."""
        kept = mask(0.5, rows=torch.tensor([7]), size=1 << 16).flatten()
        changes = (kept[1:] != kept[:-1]).sum().item()
        expected = (kept.numel() - 1) / 2
        assert abs(changes - expected) <= 5 * math.sqrt(kept.numel() / 4)

    @pytest.mark.parametrize("lag", [1, 2, 3, 4, 5, 8, 64, 1024])
    def test_columns_do_not_follow_each_other(self, lag):
        kept = mask(0.5)
        assert abs(correlation_z(kept[:, lag:], kept[:, :-lag])) < 5


class TestIndependence:
    """Masks at neighbouring coordinates: |z| < 5 fails by chance once in a million."""

    @pytest.mark.parametrize("probability", [0.1, 0.5])
    @pytest.mark.parametrize(
        "other",
        [{"seed": 2}, {"step": 1}, {"step": 2}, {"site": "b"}, {"rows": ROWS + 1}, {"rows": ROWS + 64}, {"seed": 0}],
        ids=str,
    )
    def test_of_streams(self, probability, other):
        z = correlation_z(mask(probability), mask(probability, **other))
        assert abs(z) < 5

    @pytest.mark.parametrize("dim", [1, 2], ids=["heads", "positions"])
    def test_of_neighbours_in_a_tensor(self, dim):
        keys = element_keys(row_keys(stream_key(1, 0, "attention"), ROWS[:8]), [12, 32], [0, 0])
        kept = keep_mask(keys, 64, 0.5)
        size = kept.shape[dim]
        z = correlation_z(kept.narrow(dim, 0, size - 1), kept.narrow(dim, 1, size - 1))
        assert abs(z) < 5

    def test_a_head_is_not_a_position(self):
        """(head 1, position 0) and (head 0, position 1) have streams of their own."""
        keys = element_keys(row_keys(stream_key(1, 0, "attention"), ROWS), [8, 8], [0, 0])
        assert keys.unique().numel() == keys.numel()

    def test_no_pattern_in_which_streams_share_a_column(self):
        """Over many steps, each element is dropped its share of the time: no element is favoured."""
        steps = torch.stack([mask(0.5, step=step, rows=ROWS[:4], size=64) for step in range(256)])
        counts = steps.double().sum(0).flatten()
        statistic = ((counts - 128).square() / 64).sum().item()
        assert 1e-4 < stats.chi2.sf(statistic, counts.numel()) < 1 - 1e-4


class TestSlices:
    """Any rank draws its slice of the mask that one process draws whole."""

    @pytest.mark.parametrize(("first", "size"), [(0, 64), (4, 8), (1, 5), (3, 1), (5, 30), (62, 2), (7, 57), (63, 1)])
    def test_of_columns(self, first, size):
        keys = element_keys(row_keys(stream_key(1, 0, "a"), ROWS), [3], [0])
        whole = keep_mask(keys, 64, 0.3)
        assert torch.equal(keep_mask(keys, size, 0.3, first), whole[..., first : first + size])

    @pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 7, 61])
    def test_of_widths_that_do_not_fill_a_word(self, size):
        keys = row_keys(stream_key(1, 0, "a"), ROWS)
        assert torch.equal(keep_mask(keys, size, 0.3), keep_mask(keys, 64, 0.3)[..., :size])

    def test_of_heads_and_positions(self):
        key = stream_key(1, 0, "attention")
        whole = keep_mask(element_keys(row_keys(key, ROWS), [6, 10], [0, 0]), 12, 0.3)
        part = keep_mask(element_keys(row_keys(key, ROWS[5:9]), [2, 3], [4, 7]), 12, 0.3)
        assert torch.equal(part, whole[5:9, 4:6, 7:10])

    def test_of_rows_in_any_order(self):
        rows = torch.tensor([9, 2, 2, 63])
        assert torch.equal(mask(rows=rows), mask()[rows])


def test_keys_are_left_as_they_were():
    """The mixing works in place, on copies."""
    keys, rows = torch.tensor([1, 2]), torch.tensor([3, 4])
    derive_keys(keys, rows)
    row_keys(5, rows)
    element_keys(keys, [2], [0])
    keep_mask(keys, 8, 0.1)
    assert keys.tolist() == [1, 2]
    assert rows.tolist() == [3, 4]


def test_a_mask_of_no_rows_has_no_rows():
    assert mask(rows=ROWS[:0]).shape == (0, 4096)
