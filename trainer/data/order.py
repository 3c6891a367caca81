"""The rows of each global batch, a function of seed, epoch and index in the epoch only.

World size, microbatches and workers have no effect, so every layout trains on the same rows at the same step.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainer.base.errors import UsageError

IndexArray: TypeAlias = NDArray[np.int64]

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
        self._rows: IndexArray = np.empty(0, np.int64)

    @property
    def steps_per_epoch(self) -> int:
        """The number of global batches of one epoch, with a ragged last one."""
        return -(-self.num_rows // self.global_batch_size)

    def batch(self, epoch: int, index: int) -> IndexArray:
        """Return the row ids of global batch `index` of `epoch` (both from 0), at most `[global_batch_size]`."""
        if not 0 <= index < self.steps_per_epoch:
            raise IndexError(f"an epoch holds {self.steps_per_epoch} global batches; there is no batch {index}")
        if epoch != self._epoch:
            self._rows, self._epoch = self._rows_of_epoch(epoch), epoch
        start = index * self.global_batch_size
        return self._rows[start : start + self.global_batch_size]

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

    def _rows_of_epoch(self, epoch: int) -> IndexArray:
        draws = np.random.Philox(np.random.SeedSequence([self.seed, epoch]))
        rows = _permutation(draws, self.num_rows)
        if self._lengths is None:
            return rows
        size = self.global_batch_size
        num_whole = self.num_rows // size
        batches = _sorted_in_mega_batches(rows[: num_whole * size], self._lengths, size).reshape(num_whole, size)
        ragged = rows[num_whole * size :]
        ragged = ragged[np.argsort(self._lengths[ragged], kind="stable")]
        return np.concatenate([batches[_permutation(draws, num_whole)].reshape(-1), ragged])


def _permutation(draws: np.random.Philox, size: int) -> IndexArray:
    # The raw bits of numpy's bit generators are the same in every version; `Generator.permutation` is not.
    return np.argsort(draws.random_raw(size), kind="stable")


def _sorted_in_mega_batches(rows: IndexArray, lengths: IndexArray, global_batch_size: int) -> IndexArray:
    """Sort each run of `_MEGA_BATCH` global batches by length; ties keep their shuffled order."""
    mega_batch: IndexArray = np.arange(len(rows)) // (_MEGA_BATCH * global_batch_size)
    return rows[np.lexsort((lengths[rows], mega_batch))]
