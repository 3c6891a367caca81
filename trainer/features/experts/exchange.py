"""Messages of expert ranks: tokens travel to the ranks with their experts, and the outputs return.

The ranks r of a group have the rows x_r, sorted by expert, and compute y_r; dx_r and dy_r are gradients. `[r]` selects
the rows for rank r, of a number that depends on the router; `cat` joins those of all ranks s in order. Nothing is
dropped, and nothing is padded.

| function  | forward             | backward              | y is used for                      |
|-----------|---------------------|-----------------------|------------------------------------|
| `to_rank` | y_r = cat_s x_s[r]  | dx_r = cat_s dy_s[r]  | work of experts, or sums of tokens |

The way back is the same function with the sizes exchanged. Other work may run beside a message: `to_rank` begins it,
calls a function and waits. Autograd calls the backward passes in the reverse order, so dy_r travels beside the backward
pass of that work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.features.experts.counts import read_counts
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
    # In a plan, each rank receives as many rows as it sends.
    numbers = read_counts(torch.stack([counts, received.flatten()]), num_rows)
    to_send, to_receive = ([row[i : i + sent.shape[1]] for i in range(0, len(row), sent.shape[1])] for row in numbers)
    return received, to_send, to_receive


def nothing() -> None:
    """Do nothing beside a message."""


def to_rank(
    x: Tensor,
    sent: list[int],
    received: list[int],
    group: dist.ProcessGroup,
    beside: Callable[[], object] = nothing,
) -> Tensor:
    """Return the rows of all ranks for this rank `[sum of received, H]`.

    Args:
        x: the rows of this rank `[sum of sent, H]`, by the rank that they go to.
        sent: the number of rows for each rank of the group.
        received: the number of rows from each rank.
        beside: is called while the rows are under way.
    """
    message = _Message(sent, received, group)
    rows = _Begun.apply(x, message)  # type: ignore[no-untyped-call]
    beside()
    return cast(Tensor, _Arrived.apply(rows, message))  # type: ignore[no-untyped-call]


class _Message:
    """Rows under way, and then their gradients on the way back."""

    def __init__(self, sent: list[int], received: list[int], group: dist.ProcessGroup) -> None:
        self._sizes, self._group = (sent, received), group
        self._under_way: tuple[Any, Tensor, Tensor]

    def begin(self, x: Tensor, is_back: bool) -> Tensor:
        """Begin to send rows, or gradients back, and return the memory in which those of the other ranks arrive."""
        sent, received = self._sizes[::-1] if is_back else self._sizes
        x, output = x.contiguous(), x.new_empty((sum(received), *x.shape[1:]))
        work = dist.all_to_all_single(output, x, received, sent, group=self._group, async_op=True)
        self._under_way = work, x, output  # the memory of `x` is read until the rows are sent
        return output

    def arrived(self) -> Tensor:
        """Return the rows that arrive; later work on the device waits for them, but the host does not."""
        work, _, output = self._under_way
        del self._under_way
        work.wait()
        return output


class _Begun(torch.autograd.Function):
    """Begin to send rows; the backward pass waits for their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, message: _Message) -> Tensor:
        ctx.message = message
        return message.begin(x, is_back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.message.arrived(), None


class _Arrived(torch.autograd.Function):
    """Wait for rows; the backward pass begins to send their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, message: _Message) -> Tensor:
        ctx.message = message
        message.arrived()
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.message.begin(gradient, is_back=True)
        return gradient, None  # `_Begun` has those that arrive
