"""The rows of each expert: on the device, and on the host, which waits for them at most once in a layer.

A recomputation gets the numbers of its forward pass without another wait.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch._subclasses import FakeTensor

from trainer.models.checkpointing import kept_result


class RowCounts:
    """The rows of each expert of this rank.

    Args:
        on_device: the numbers `[experts]`, int64.
        num_rows: their sum.
        is_grouped: whether products use a grouped kernel, which reads the numbers on the device.
        on_host: the numbers, if the host has them.
    """

    def __init__(self, on_device: Tensor, num_rows: int, is_grouped: bool, on_host: list[int] | None = None) -> None:
        self.on_device, self.is_grouped = on_device, is_grouped
        self._num_rows, self._on_host = num_rows, on_host

    @property
    def on_host(self) -> list[int]:
        """The numbers on the host, which waits for them at the first call."""
        if self._on_host is None:
            (self._on_host,) = kept_result(partial(read_counts, self.on_device[None], self._num_rows))
        return self._on_host


def read_counts(counts: Tensor, num_rows: int) -> list[list[int]]:
    """Return numbers `[n, experts]` on the host, which waits for them.

    A plan knows no values: each row gets equal shares of `num_rows`.
    """
    read = counts if counts.is_meta else counts.cpu()  # plans count this wait
    if read.is_meta or isinstance(read, FakeTensor):
        share, rest = divmod(num_rows, counts.shape[1])
        return [[share + (number < rest) for number in range(counts.shape[1])] for _ in counts]
    numbers: list[list[int]] = read.tolist()
    return numbers
