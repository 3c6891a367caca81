from __future__ import annotations

import pickle
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.base.errors import UsageError
from trainer.data import order as order_module
from trainer.data.order import FeistelPermutation, GlobalOrder, Mixture


def epoch_rows(order: GlobalOrder, epoch: int) -> np.ndarray:
    return np.concatenate([order.batch(epoch, index) for index in range(order.steps_per_epoch)])


sizes = st.tuples(st.integers(1, 300), st.integers(1, 50), st.booleans(), st.integers(0, 2**63 - 1))


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(0, 3))
def test_every_epoch_holds_every_row_once(size, epoch):
    num_rows, batch_size, grouped, seed = size
    lengths = np.random.default_rng(0).integers(1, 40, num_rows) if grouped else None
    order = GlobalOrder(num_rows, lengths, batch_size, seed)
    assert sorted(epoch_rows(order, epoch)) == list(range(num_rows))
    batches = [len(order.batch(epoch, index)) for index in range(order.steps_per_epoch)]
    assert batches[:-1] == [batch_size] * (len(batches) - 1)
    assert batches[-1] == (num_rows % batch_size or batch_size)


@settings(max_examples=30, deadline=None)
@given(sizes)
def test_a_batch_does_not_depend_on_earlier_requests(size):
    num_rows, batch_size, grouped, seed = size
    lengths = np.arange(num_rows) % 17 if grouped else None
    walked = GlobalOrder(num_rows, lengths, batch_size, seed)
    for epoch in range(2):
        epoch_rows(walked, epoch)
    index = walked.steps_per_epoch // 2
    jumped = GlobalOrder(num_rows, lengths, batch_size, seed)
    np.testing.assert_array_equal(jumped.batch(1, index), walked.batch(1, index))


@pytest.mark.parametrize("grouped", [False, True])
def test_seed_and_epoch_change_the_order(grouped):
    lengths = np.arange(200) % 13 if grouped else None
    orders = [epoch_rows(GlobalOrder(200, lengths, 8, seed), epoch).tolist() for seed in (1, 2) for epoch in (0, 1)]
    assert len({tuple(rows) for rows in orders}) == 4


def test_the_order_is_the_same_in_every_version():
    order = GlobalOrder(10, None, 10, seed=42)
    assert order.batch(0, 0).tolist() == [0, 1, 4, 2, 6, 8, 5, 9, 7, 3]


def test_grouped_batches_hold_rows_of_similar_length_sorted():
    lengths = np.random.default_rng(1).integers(1, 100, 2003)
    order = GlobalOrder(2003, lengths, 16, seed=0)
    batches = [lengths[order.batch(0, index)] for index in range(order.steps_per_epoch)]
    assert all(np.all(np.diff(batch) >= 0) for batch in batches)
    spread = np.mean([batch[-1] - batch[0] for batch in batches[:-1]])
    assert spread < 10  # of shuffled rows it is near 90
    means = [batch.mean() for batch in batches]
    assert abs(np.corrcoef(np.arange(len(means)), means)[0, 1]) < 0.3, "batches must not come sorted by length"


def test_the_ragged_batch_is_last_and_random():
    lengths = np.arange(103)
    ragged = [GlobalOrder(103, lengths, 10, seed).batch(0, 10).tolist() for seed in range(5)]
    assert {len(rows) for rows in ragged} == {3}
    assert len({tuple(rows) for rows in ragged}) == 5


def test_position_counts_ragged_batches():
    order = GlobalOrder(10, None, 4, seed=0)  # an epoch: 4 + 4 + 2
    consumed, seen = 0, []
    for step in range(7):
        seen.append(order.position(consumed))
        consumed += len(order.batch(*divmod(step, 3)))
    assert seen == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]


def test_a_position_inside_a_batch_is_refused():
    with pytest.raises(UsageError, match=r"`training.global_batch_size` is 4.* after the 5 samples"):
        GlobalOrder(10, None, 4, seed=0).position(5)


def test_a_batch_past_the_epoch_is_refused():
    with pytest.raises(IndexError):
        GlobalOrder(10, None, 4, seed=0).batch(0, 3)


class TestComputedOrder:
    """Orders of splits that are too large for an array; here, of any size."""

    @pytest.fixture(autouse=True)
    def computed(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(order_module, "LARGEST_ARRAY", 0)

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(sizes, st.integers(0, 3))
    def test_every_epoch_holds_every_row_once(self, size, epoch):
        num_rows, batch_size, grouped, seed = size
        lengths = np.random.default_rng(0).integers(1, 40, num_rows) if grouped else None
        order = GlobalOrder(num_rows, lengths, batch_size, seed)
        assert sorted(epoch_rows(order, epoch)) == list(range(num_rows))
        index = order.steps_per_epoch // 2
        again = GlobalOrder(num_rows, lengths, batch_size, seed)
        np.testing.assert_array_equal(again.batch(epoch, index), order.batch(epoch, index))

    @pytest.mark.parametrize("grouped", [False, True])
    def test_seed_and_epoch_change_the_order(self, grouped):
        test_seed_and_epoch_change_the_order(grouped)

    def test_the_order_is_the_same_in_every_version(self):
        assert GlobalOrder(10, None, 10, seed=42).batch(0, 0).tolist() == [2, 0, 6, 1, 5, 3, 9, 8, 7, 4]

    @pytest.mark.parametrize("num_rows", [2003, 96, 5])
    def test_with_the_permutations_of_the_array_it_is_the_order_of_the_array(self, monkeypatch, num_rows):
        class Permutation:
            def __init__(self, size, draws):
                self.images = order_module.permutation(draws, size)

            def __call__(self, numbers):
                return self.images[numbers]

        lengths = np.random.default_rng(1).integers(1, 100, num_rows)
        monkeypatch.setattr(order_module, "FeistelPermutation", Permutation)
        found = epoch_rows(GlobalOrder(num_rows, lengths, 16, seed=3), 1)
        monkeypatch.setattr(order_module, "LARGEST_ARRAY", num_rows)
        np.testing.assert_array_equal(found, epoch_rows(GlobalOrder(num_rows, lengths, 16, seed=3), 1))


def images(size: int, seed: int, number: int | None = None) -> np.ndarray:
    return FeistelPermutation(size, np.random.Philox(seed))(np.arange(number or size))


class TestFeistelPermutation:
    @pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 101, 1000, 65537])
    def test_it_is_a_permutation(self, size):
        assert sorted(images(size, size)) == list(range(size))

    def test_each_number_comes_to_each_place_equally_often(self):
        size, trials = 37, 600
        counts = np.zeros((size, size))
        for seed in range(trials):
            counts[np.arange(size), images(size, seed)] += 1
        # chi-square with 36 * 36 degrees of freedom: mean 1296, standard deviation 51
        assert abs(np.sum((counts - trials / size) ** 2) / (trials / size) - 36 * 36) < 4 * 51

    def test_pairs_of_neighbours_are_independent(self):
        size, trials = 11, 1100
        counts = np.zeros((size, size))
        for seed in range(trials):
            first, second = images(size, seed, 2)
            counts[first, second] += 1
        assert np.all(np.diag(counts) == 0)
        expected = trials / (size * (size - 1))
        off = counts[~np.eye(size, dtype=bool)]
        # chi-square with 109 degrees of freedom: standard deviation 15
        assert abs(np.sum((off - expected) ** 2) / expected - 109) < 4 * 15

    def test_a_large_one_has_no_trend_and_few_fixed_points(self):
        size = 1_000_003
        found = images(size, 0)
        assert np.count_nonzero(found == np.arange(size)) < 8  # of a random permutation: 1 in the mean
        for lag in (1, 2, 1000, 1001):  # 1001 is the number of columns
            assert abs(np.corrcoef(found[:-lag], found[lag:])[0, 1]) < 0.005
        assert abs(np.corrcoef(found, np.arange(size))[0, 1]) < 0.005
        assert abs(np.count_nonzero(np.diff(found) > 0) / size - 0.5) < 0.003

    def test_a_batch_of_a_billion_rows_takes_no_memory(self):
        tracemalloc.start()
        order = GlobalOrder(10**9 + 7, None, 4096, seed=0)
        rows = np.concatenate([order.batch(epoch, 200_000) for epoch in (0, 1)])
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < 2 << 20
        assert len(set(rows.tolist())) > 8180  # two epochs may share a few
        assert 0.45 < rows.mean() / 10**9 < 0.55


class TestMixture:
    SIZES, WEIGHTS = (30, 700, 70), (0.5, 0.2, 0.3)

    def mixed(self, lengths=None, batch_size=16):
        return GlobalOrder(800, lengths, batch_size, 7, Mixture(self.SIZES, self.WEIGHTS, 7))

    def counts(self, rows):
        """The number of times that each row was read, by source."""
        return np.split(np.bincount(rows, minlength=800), np.cumsum(self.SIZES)[:-1])

    @pytest.mark.parametrize("grouped", [False, True])
    def test_an_epoch_has_the_shares_and_reads_all_rows_of_a_source_equally_often(self, grouped):
        lengths = np.random.default_rng(1).integers(1, 100, 800) if grouped else None
        read = []
        for epoch in range(3):
            read.append(epoch_rows(self.mixed(lengths), epoch))
            assert [found.sum() for found in self.counts(read[-1])] == [400, 160, 240]
            for found in self.counts(np.concatenate(read)):
                assert found.max() - found.min() <= 1
        assert read[0].tolist() != read[1].tolist()

    def test_each_pass_has_another_order(self):
        mixture = Mixture((50, 50), (1, 1), 3)
        passes = [mixture.rows(epoch, np.arange(50)).tolist() for epoch in range(3)]
        assert all(sorted(found) == list(range(50)) for found in passes)
        assert len(set(map(tuple, passes))) == 3

    def test_sources_are_spread_over_the_epoch(self):
        batches = [self.mixed().batch(0, index) < 30 for index in range(50)]
        assert 2 < np.std([batch.sum() for batch in batches]) ** 2 < 8  # of a binomial distribution: 4

    def test_grouped_batches_hold_rows_of_similar_length(self):
        lengths = np.random.default_rng(1).integers(1, 100, 800)
        for index in range(50):
            assert np.all(np.diff(lengths[self.mixed(lengths).batch(0, index)]) >= 0)

    def test_computed_orders_are_mixed_too(self, monkeypatch):
        monkeypatch.setattr(order_module, "LARGEST_ARRAY", 0)
        for lengths in (None, np.arange(800)):
            counts = self.counts(epoch_rows(self.mixed(lengths), 1))
            assert [found.sum() for found in counts] == [400, 160, 240]

    def test_a_batch_does_not_depend_on_earlier_requests(self):
        walked = self.mixed()
        for epoch in range(3):
            epoch_rows(walked, epoch)
        np.testing.assert_array_equal(self.mixed().batch(1, 20), walked.batch(1, 20))

    def test_many_short_passes_are_fast(self):
        mixture = Mixture((10, 200_000), (1, 1), 0)
        start = time.process_time()
        rows = mixture.rows(0, np.arange(mixture.num_rows))
        assert time.process_time() - start < 5  # seconds; a search of each pass would take minutes
        assert set(np.bincount(rows)[:10]) <= {10_000, 10_001}

    def test_it_can_be_pickled(self):
        mixture = Mixture((10, 20), (1, 1), 0)
        rows = mixture.rows(1, np.arange(30))
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(mixture)).rows(1, np.arange(30)), rows)

    def test_large_weights_are_shares_too(self):
        assert Mixture((10, 20), (1e308, 1e308), 0).counts == [15, 15]

    @pytest.mark.parametrize(
        ("sizes", "weights", "message"),
        [
            ((30, 70), (1, 1e-9), r"\[1\]` must be at least one row's share"),
            ((0, 70), (1, 1), r"\[0\]` must be the weight"),
        ],
    )
    def test_a_source_without_rows_is_refused(self, sizes, weights, message):
        with pytest.raises(UsageError, match=rf"`data.mixture{message}"):
            Mixture(sizes, weights, 0)
