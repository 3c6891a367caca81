"""The rows of each global batch, a function of seed, epoch and index in the epoch only.

World size, microbatches and workers have no effect, so every layout trains on the same rows at the same step. Up to
`LARGEST_ARRAY` rows, the order of an epoch is an array; above, each row is computed when its batch is, in constant time
and memory.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.base.errors import UsageError
from trainer.parallel.random import derive_keys

IndexArray: TypeAlias = NDArray[np.int64]

LARGEST_ARRAY = 1 << 22
"""The most rows of an epoch with an order in an array, which takes 16 bytes a row for a moment, and then 8."""

_FEISTEL_ROUNDS = 8
_MEGA_BATCH = 50  # number of global batches sorted by length together: rows are well sorted and well shuffled


class GlobalOrder:
    """The order of all global batches of a training split.

    Every epoch holds each row exactly once. If the number of rows is not a multiple of the global batch size, the last
    batch of each epoch is ragged: it holds the remaining rows.

    Args:
        num_rows: the number of rows of the split, at least 1.
        lengths: the tokens of each row, of shape `[num_rows]`, to batch rows of similar length; None: shuffle only.
        global_batch_size: the number of rows of one optimizer step over all ranks.
        seed: the recipe's seed.
    """

    def __init__(self, num_rows: int, lengths: IndexArray | None, global_batch_size: int, seed: int) -> None:
        self.num_rows = num_rows
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
        if self._order is None or epoch != self._epoch:
            kind = _ArrayOrder if self.num_rows <= LARGEST_ARRAY else _ComputedOrder
            draws = np.random.Philox(np.random.SeedSequence([self.seed, epoch]))
            self._order, self._epoch = kind(self.num_rows, self._lengths, self.global_batch_size, draws), epoch
        return self._order.batch(index)

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
                f" {num_samples} samples that the checkpoint has consumed of {self.num_rows} rows an epoch; go on with"
                " the batch size and the data it was trained with, or start anew in another `checkpoint.folder`"
            )
        return epoch, index


class _ArrayOrder:
    """The rows of an epoch in an array."""

    def __init__(self, num_rows: int, lengths: IndexArray | None, size: int, draws: np.random.Philox) -> None:
        self._size = size
        self._rows = _permutation(draws, num_rows)
        if lengths is None:
            return
        num_whole = num_rows // size
        batches = _sorted_in_mega_batches(self._rows[: num_whole * size], lengths, size).reshape(num_whole, size)
        ragged = self._rows[num_whole * size :]
        ragged = ragged[np.argsort(lengths[ragged], kind="stable")]
        self._rows = np.concatenate([batches[_permutation(draws, num_whole)].reshape(-1), ragged])

    def batch(self, index: int) -> IndexArray:
        return self._rows[index * self._size : (index + 1) * self._size]


class _ComputedOrder:
    """The rows of an epoch, computed batch by batch; sorted by length, a batch needs the rows of its mega-batch."""

    def __init__(self, num_rows: int, lengths: IndexArray | None, size: int, draws: np.random.Philox) -> None:
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
            begin = index - index % _MEGA_BATCH
            end = min(begin + _MEGA_BATCH, self._num_rows // size)
            rows = _sorted_in_mega_batches(self._row(np.arange(begin * size, end * size)), self._lengths, size)
            return rows[(index - begin) * size : (index - begin + 1) * size]
        rows = self._row(np.arange(start, stop))
        return rows[np.argsort(self._lengths[rows], kind="stable")]


class FeistelPermutation:
    """A pseudorandom permutation of the numbers below `size`, computed for any of them without an array of all.

    A number is a pair (left, right) below about the root of `size`. Each round adds a hash of `right` to `left` and
    swaps them. Results of `size` or more go through the rounds again; these are few.

    Source: Black & Rogaway 2002, "Ciphers with Arbitrary Finite Domains" (doi:10.1007/3-540-45760-7_9).

    Args:
        size: the number of numbers, at least 1.
        draws: the source of the keys of the rounds.
    """

    def __init__(self, size: int, draws: np.random.Philox) -> None:
        self._size = size
        self._columns = math.isqrt(size - 1) + 1
        self._rows = -(-size // self._columns)
        self._keys = draws.random_raw(_FEISTEL_ROUNDS).view(np.int64)

    def __call__(self, numbers: IndexArray) -> IndexArray:
        """Return the images of `numbers`, of the same shape `[n]`."""
        images = self._once(numbers)
        while (outside := images >= self._size).any():
            images[outside] = self._once(images[outside])
        return images

    def _once(self, numbers: IndexArray) -> IndexArray:
        left, right = np.divmod(numbers, self._columns)
        num_left, num_right = self._rows, self._columns
        for key in self._keys:
            words: NDArray[np.uint64] = derive_keys(torch.tensor(key), torch.from_numpy(right)).numpy().view(np.uint64)
            sums = (left + (words % np.uint64(num_left)).astype(np.int64)) % num_left
            left, right = right, sums
            num_left, num_right = num_right, num_left
        return left * num_right + right


def _permutation(draws: np.random.Philox, size: int) -> IndexArray:
    # The raw bits of numpy's bit generators are the same in every version; `Generator.permutation` is not.
    return np.argsort(draws.random_raw(size), kind="stable")


def _sorted_in_mega_batches(rows: IndexArray, lengths: IndexArray, global_batch_size: int) -> IndexArray:
    """Sort each run of `_MEGA_BATCH` global batches by length; ties keep their shuffled order."""
    mega_batch: IndexArray = np.arange(len(rows)) // (_MEGA_BATCH * global_batch_size)
    return rows[np.lexsort((lengths[rows], mega_batch))]
