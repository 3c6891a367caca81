"""Messages of expert ranks: tokens travel to the ranks with their experts, and the outputs return.

The ranks r of a group have the rows x_r, sorted by expert, and compute y_r; dx_r and dy_r are gradients. `[r]` selects
the rows for rank r, of a number that depends on the router; `cat` joins those of all ranks s in order. Nothing is
dropped, and nothing is padded.

| function  | forward             | backward              | y is used for                      |
|-----------|---------------------|-----------------------|------------------------------------|
| `to_rank` | y_r = cat_s x_s[r]  | dx_r = cat_s dy_s[r]  | work of experts, or sums of tokens |

The way back is the same function with the sizes exchanged.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd.function import once_differentiable

from trainer.parallel.groups import group_size


def exchanged_counts(
    counts: Tensor, num_rows: int, group: dist.ProcessGroup
) -> tuple[Tensor, list[list[int]], list[list[int]]]:
    """Return how many rows this rank receives, and both numbers on the host; the host waits for them once.

    Args:
        counts: the rows of this rank for each expert, int64 `[experts]`; their sum is `num_rows`.

    Returns:
        The rows that each rank sends for each expert of this rank, `[ranks, experts / ranks]`; the rows that this rank
        sends to each rank, for each of its experts; and those that it receives.
    """
    sent = counts.view(group_size(group), -1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    if isinstance(counts, FakeTensor):
        shares = equal_shares(num_rows, len(counts))
        of_ranks = [shares[start : start + sent.shape[1]] for start in range(0, len(shares), sent.shape[1])]
        return received, of_ranks, of_ranks
    to_send, to_receive = torch.stack([sent, received]).tolist()
    return received, to_send, to_receive


def equal_shares(num_rows: int, count: int) -> list[int]:
    """Return the rows of each of `count` experts in a plan, which knows no values."""
    share, rest = divmod(num_rows, count)
    return [share + (number < rest) for number in range(count)]


def to_rank(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Return the rows of all ranks for this rank `[sum of received, H]`.

    Args:
        x: the rows of this rank `[sum of sent, H]`, by the rank that they go to.
        sent: the number of rows for each rank of the group.
        received: the number of rows from each rank.
    """
    return cast(Tensor, _ToRank.apply(x, sent, received, group))  # type: ignore[no-untyped-call]


class _ToRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(x, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    output = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(output, x.contiguous(), received, sent, group=group)
    return output
