"""The rows of each global batch, a function of seed, epoch and index in the epoch only.

World size, microbatches and workers have no effect, so every layout trains on the same rows at the same step. Up to
`LARGEST_ARRAY` rows, the order of an epoch is an array; above, each row is computed when its batch is, in constant time
and memory. A mixture of sources gives each place of this order a row of one source.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.base.errors import UsageError
from trainer.parallel.random import derive_keys

IndexArray: TypeAlias = NDArray[np.int64]

LARGEST_ARRAY = 1 << 22
"""The most rows of an epoch with an order in an array, which takes 16 bytes a row for a moment, and then 8."""

_FEISTEL_ROUNDS = 8  # even: the halves differ in size and change places in each round, and must end as they began
_AT_ONCE = 1 << 18  # rows of a mixture, with 64 bytes of keys each
_MEGA_BATCH = 50  # number of global batches sorted by length together: rows are well sorted and well shuffled


Lengths: TypeAlias = Callable[[IndexArray], IndexArray]
"""The number of tokens of each row, computed for any rows."""


class Mixture:
    """The rows of an epoch that has a share of each source: a number of the epoch stands for a row.

    An epoch has as many rows as all sources together. A source is read pass by pass, each in another order, and an
    epoch goes on where the epoch before it stopped. At the end of an epoch, each row of a source has been read equally
    often, or once more than others. Within an epoch, its passes are mixed.

    Args:
        sizes: the number of rows of each source; the rows of a source are consecutive.
        weights: the weight of each source, above 0; they need not sum to 1.

    Raises:
        UsageError: a weight is so small that an epoch has no row of its source.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        self.num_rows = sum(sizes)
        self.counts = shares_of_sources(sizes, weights)
        self.sizes = sizes
        self._first_rows = np.cumsum([0, *sizes])
        self._first_numbers = np.cumsum([0, *self.counts])
        # A stream of keys for each source, so that a further source does not change the order of the others.
        draws = [np.random.Philox(np.random.SeedSequence(seed, spawn_key=(source,))) for source in range(len(sizes))]
        self._keys = [draw.random_raw(1).view(np.int64) for draw in draws]

    def rows(self, epoch: int, numbers: IndexArray) -> IndexArray:
        """Return the rows that numbers below `num_rows` stand for in an epoch, of the same shape `[n]`."""
        pieces = [numbers[start : start + _AT_ONCE] for start in range(0, len(numbers), _AT_ONCE)]
        return np.concatenate([self._rows(epoch, piece) for piece in pieces]) if pieces else numbers

    def _rows(self, epoch: int, numbers: IndexArray) -> IndexArray:
        rows = np.empty_like(numbers)
        # From the right: a number at a border belongs to the source that begins there.
        sources = np.searchsorted(self._first_numbers, numbers, side="right") - 1
        for source in np.unique(sources):
            of_source = np.flatnonzero(sources == source)
            # The rows of this source that were read before, over all epochs, tell its pass and the place in it.
            read = epoch * self.counts[source] + numbers[of_source] - self._first_numbers[source]
            passes, places = np.divmod(read, self.sizes[source])
            of_passes = derive_keys(torch.from_numpy(self._keys[source]), torch.from_numpy(passes)).squeeze(0)
            keys = derive_keys(of_passes, torch.arange(_FEISTEL_ROUNDS)).T  # [rounds, n]
            rows[of_source] = self._first_rows[source] + _permuted(places, self.sizes[source], keys)
        return rows


def shares_of_sources(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Return the number of rows that an epoch of a mixture has of each source.

    Args:
        sizes: the number of rows of each source; an epoch has as many as all together.

    Raises:
        UsageError: a source has no row, or its share is none.
    """
    total = sum(sizes)
    counts = _shares(total, weights)
    for index, (count, size) in enumerate(zip(counts, sizes, strict=True)):
        if not size:
            raise UsageError(
                f"`data.mixture[{index}]` must be the weight of rows to train on, but its files have none; remove"
                " them, or hold fewer rows out in `data.validation`"
            )
        if not count:
            raise UsageError(
                f"`data.mixture[{index}]` must be at least one row's share of an epoch of {total:,} rows,"
                f" but is {weights[index]}; use a larger weight"
            )
    return counts


def _shares(total: int, weights: Sequence[float]) -> list[int]:
    """Return whole numbers with the sum `total`, in proportion to `weights` (largest remainders)."""
    # Relative to the largest first: sums of huge or tiny weights would overflow, or vanish.
    relative = [weight / max(weights) for weight in weights]
    exact = [total * weight / sum(relative) for weight in relative]
    shares = [int(share) for share in exact]
    # A stable sort: equal remainders keep the order of the sources, on every rank.
    by_rest = sorted(range(len(weights)), key=lambda index: shares[index] - exact[index])
    for index in by_rest[: total - sum(shares)]:
        shares[index] += 1
    return shares


class GlobalOrder:
    """The order of all global batches of a training split.

    Every epoch holds each row exactly once, unless a mixture chooses its rows. If the number of rows is not a multiple
    of the global batch size, the last batch of each epoch is ragged: it holds the remaining rows.

    Args:
        lengths: the tokens of each row, of shape `[num_rows]`, to batch rows of similar length; None: shuffle only.
        mixture: gives each number of an epoch its row; None: the number itself.
    """

    def __init__(
        self,
        num_rows: int,
        lengths: IndexArray | None,
        global_batch_size: int,
        seed: int,
        mixture: Mixture | None = None,
    ) -> None:
        assert mixture is None or mixture.num_rows == num_rows
        self.num_rows = num_rows
        self._mixture = mixture
        self.global_batch_size = global_batch_size
        self.seed = seed
        self._lengths = lengths
        self._epoch = -1
        self._order: _ArrayOrder | _ComputedOrder | None = None

    @property
    def steps_per_epoch(self) -> int:
        """The number of global batches of one epoch, with a ragged last one."""
        return -(-self.num_rows // self.global_batch_size)

    def batch(self, epoch: int, index: int) -> IndexArray:
        """Return the row ids of global batch `index` of `epoch` (both from 0), at most `[global_batch_size]`."""
        if not 0 <= index < self.steps_per_epoch:
            raise IndexError(f"an epoch holds {self.steps_per_epoch} global batches; there is no batch {index}")
        # One epoch at a time is kept; its order is a function of seed and epoch, so nothing is lost.
        if self._order is None or epoch != self._epoch:
            kind = _ArrayOrder if self.num_rows <= LARGEST_ARRAY else _ComputedOrder
            # A stream for each epoch, so that a resumed run need not draw the epochs before.
            draws = np.random.Philox(np.random.SeedSequence([self.seed, epoch]))
            # No lambda: worker processes that do not fork get the order by pickle.
            lengths = None if self._lengths is None else partial(self._lengths_of, self._lengths, epoch)
            self._order, self._epoch = kind(self.num_rows, lengths, self.global_batch_size, draws), epoch
        return self._rows(epoch, self._order.batch(index))

    def _lengths_of(self, lengths: IndexArray, epoch: int, numbers: IndexArray) -> IndexArray:
        return lengths[self._rows(epoch, numbers)]

    def _rows(self, epoch: int, numbers: IndexArray) -> IndexArray:
        return numbers if self._mixture is None else self._mixture.rows(epoch, numbers)

    def position(self, num_samples: int) -> tuple[int, int]:
        """Return the epoch and the index of the global batch that follows `num_samples` consumed rows.

        Raises:
            UsageError: no global batch starts there, because the batch size or the split has changed.
        """
        epoch, consumed = divmod(num_samples, self.num_rows)
        index, rest = divmod(consumed, self.global_batch_size)
        if rest:
            raise UsageError(
                f"`training.global_batch_size` is {self.global_batch_size}, but no such batch starts after the"
                f" {num_samples} samples that the checkpoint has consumed of {self.num_rows} rows an epoch; continue"
                " with the batch size and the data of the checkpoint, or start a new run in another `checkpoint.folder`"
            )
        return epoch, index


class _ArrayOrder:
    def __init__(self, num_rows: int, lengths: Lengths | None, size: int, draws: np.random.Philox) -> None:
        self._size = size
        self._rows = permutation(draws, num_rows)
        if lengths is None:
            return
        # The batches are drawn after the rows: another order of the draws would be another order of every run.
        num_whole = num_rows // size
        batches = _sorted_in_mega_batches(self._rows[: num_whole * size], lengths, size).reshape(num_whole, size)
        ragged = self._rows[num_whole * size :]
        ragged = ragged[np.argsort(lengths(ragged), kind="stable")]
        self._rows = np.concatenate([batches[permutation(draws, num_whole)].reshape(-1), ragged])

    def batch(self, index: int) -> IndexArray:
        return self._rows[index * self._size : (index + 1) * self._size]


class _ComputedOrder:
    """The rows of an epoch, computed batch by batch; sorted by length, a batch needs the rows of its mega-batch."""

    def __init__(self, num_rows: int, lengths: Lengths | None, size: int, draws: np.random.Philox) -> None:
        self._num_rows = num_rows
        self._lengths = lengths
        self._size = size
        self._row = FeistelPermutation(num_rows, draws)
        self._batch = FeistelPermutation(num_rows // size, draws) if num_rows >= size else None

    def batch(self, index: int) -> IndexArray:
        size = self._size
        start, stop = index * size, min((index + 1) * size, self._num_rows)
        if self._lengths is None:
            return self._row(np.arange(start, stop))
        if self._batch is not None and stop - start == size:
            index = int(self._batch(np.array([index]))[0])
            # The batch lies in this run of global batches, which is sorted as a whole.
            begin = index - index % _MEGA_BATCH
            end = min(begin + _MEGA_BATCH, self._num_rows // size)
            rows = _sorted_in_mega_batches(self._row(np.arange(begin * size, end * size)), self._lengths, size)
            return rows[(index - begin) * size : (index - begin + 1) * size]
        rows = self._row(np.arange(start, stop))
        return rows[np.argsort(self._lengths(rows), kind="stable")]


class FeistelPermutation:
    """A pseudorandom permutation of the numbers below `size`, computed for any of them without an array of all.

    A number is a pair (left, right) below about the root of `size`. Each round adds a hash of `right` to `left` and
    swaps them. Results of `size` or more go through the rounds again; these are few.

    Source: Black & Rogaway 2002, "Ciphers with Arbitrary Finite Domains" (doi:10.1007/3-540-45760-7_9).

    Args:
        draws: the source of the keys of the rounds.
    """

    def __init__(self, size: int, draws: np.random.Philox) -> None:
        self._size = size
        self._keys = torch.from_numpy(draws.random_raw(_FEISTEL_ROUNDS).view(np.int64))

    def __call__(self, numbers: IndexArray) -> IndexArray:
        """Return the images of `numbers`, of the same shape `[n]`."""
        return _permuted(numbers, self._size, self._keys.unsqueeze(1))


def _permuted(numbers: IndexArray, size: int, keys: torch.Tensor) -> IndexArray:
    """Return the images of `numbers` `[n]` under `FeistelPermutation`s of `size` numbers with `keys`.

    Args:
        numbers: the numbers, below `size`.
        keys: the keys of the rounds, `[rounds, n]`, or `[rounds, 1]` for all numbers.
    """
    # The rounds permute the numbers below left × right, so going on from a number outside ends at one below `size`,
    # and no two numbers end at the same one.
    images = _once(numbers, size, keys)
    while (outside := images >= size).any():
        some = keys if keys.shape[1] == 1 else keys[:, torch.from_numpy(outside)]
        images[outside] = _once(images[outside], size, some)
    return images


def _once(numbers: IndexArray, size: int, keys: torch.Tensor) -> IndexArray:
    # The two factors are about the root, so that few numbers lie outside of `size`.
    num_right = math.isqrt(size - 1) + 1
    num_left = -(-size // num_right)
    left, right = np.divmod(numbers, num_right)
    for of_round in keys:
        mixed = derive_keys(of_round, torch.from_numpy(right).unsqueeze(1)).squeeze(1)
        words: NDArray[np.uint64] = mixed.numpy().view(np.uint64)
        sums = (left + (words % np.uint64(num_left)).astype(np.int64)) % num_left
        # The halves differ in size, so their sizes change places, too.
        left, right = right, sums
        num_left, num_right = num_right, num_left
    return left * num_right + right


def permutation(draws: np.random.Philox, size: int) -> IndexArray:
    """Return a shuffled order of the numbers below `size`, which is the same with every version of numpy."""
    # The raw bits of numpy's bit generators are the same in every version; `Generator.permutation` is not.
    return np.argsort(draws.random_raw(size), kind="stable")


def _sorted_in_mega_batches(rows: IndexArray, lengths: Lengths, global_batch_size: int) -> IndexArray:
    """Sort each run of `_MEGA_BATCH` global batches by length; ties keep their shuffled order."""
    mega_batch: IndexArray = np.arange(len(rows)) // (_MEGA_BATCH * global_batch_size)
    # The last key of `lexsort` decides first, and its sort is stable.
    return rows[np.lexsort((lengths(rows), mega_batch))]
