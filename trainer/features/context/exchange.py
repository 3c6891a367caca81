"""Messages of context ranks: the exchange of positions for heads, and shifts around rings.

The ranks r of a group have x_r and compute y_r; dx_r and dy_r are gradients. `[r]` selects the positions of rank r,
`[heads r]` its attention heads; `cat` joins those of all ranks. The exchanges are those of DeepSpeed-Ulysses (Jacobs et
al. 2023, arXiv:2309.14509, section 3.1).

| function             | forward                  | backward                   | y is used for                 |
|----------------------|--------------------------|----------------------------|-------------------------------|
| `positions_to_heads` | y_r = cat_s x_s[heads r] | dx_r = cat_s dy_s[r]       | work on each rank's heads     |
| `heads_to_positions` | y_r = cat_s x_s[r]       | dx_r = cat_s dy_s[heads r] | work on each rank's positions |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.parallel.groups import Group, group_size, index_in_group


def positions_to_heads(x: Tensor, group: Group, degree: int) -> Tensor:
    """Return more positions of this rank's heads, `[batch, heads / degree, positions * degree, head_dim]`.

    `x` has all heads of this rank's positions, `[batch, heads, positions, head_dim]`. Each `degree` consecutive ranks
    of the group exchange with each other only; r and s are their indices. `degree` divides the heads and the ranks.
    """
    return _apply(x, group, degree, _to_heads, _to_positions)


def heads_to_positions(x: Tensor, group: Group, degree: int) -> Tensor:
    """Return all heads of this rank's positions: the inverse of `positions_to_heads`."""
    return _apply(x, group, degree, _to_positions, _to_heads)


def begin_shift(tensors: Sequence[Tensor], group: Group, distance: int, tag: int = 0) -> Callable[[], list[Tensor]]:
    """Begin to send tensors to the rank `distance` further in the group, and to receive those of the rank before.

    The last ranks send to the first ones, so ranks at this distance form rings. All ranks of the group must call it.

    Args:
        tensors: tensors of the same shapes and types on all ranks; they must not change before the returned call.
        distance: the distance of the neighbours.
        tag: a number that separates shifts of the same time, on gloo; NCCL keeps their order.

    Returns:
        A function that waits and returns the received tensors.
    """
    assert group is not None, "a ring has several ranks"
    size, index = group_size(group), index_in_group(group)
    # The list keeps the copies alive until `wait`: the transfers read their memory.
    sent = [tensor.contiguous() for tensor in tensors]
    received = [torch.empty_like(tensor) for tensor in sent]
    operations = []
    for number, (ours, theirs) in enumerate(zip(sent, received, strict=True)):
        for transfer, tensor, step in ((dist.isend, ours, distance), (dist.irecv, theirs, -distance)):
            peer = dist.get_global_rank(group, (index + step) % size)
            # Each tensor has a tag of its own, so that gloo pairs it with the right receive.
            operations.append(dist.P2POp(transfer, tensor, peer, group, tag=tag + number))
    # As one batch, NCCL starts sends and receives together. One by one, all ranks of a ring would wait in their send.
    works = dist.batch_isend_irecv(operations)

    def wait() -> list[Tensor]:
        for work in works:
            work.wait()
        sent.clear()
        return received

    return wait


def _apply(
    x: Tensor,
    group: Group,
    degree: int,
    forward: Callable[[Tensor, dist.ProcessGroup, int], Tensor],
    backward: Callable[[Tensor, dist.ProcessGroup, int], Tensor],
) -> Tensor:
    if degree == 1:
        return x
    return cast(Tensor, _Exchange.apply(x, group, degree, forward, backward))  # type: ignore[no-untyped-call]


class _Exchange(torch.autograd.Function):
    """An exchange of both passes, each the inverse of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, degree: int, forward: Any, backward: Any) -> Tensor:
        ctx.group, ctx.degree, ctx.inverse = group, degree, backward
        return cast(Tensor, forward(x, group, degree))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.inverse(grad, ctx.group, ctx.degree), None, None, None, None


def _to_heads(x: Tensor, group: dist.ProcessGroup, degree: int) -> Tensor:
    batch, _, part, width = x.shape
    # `[degree, batch, heads / degree, part, width]`: consecutive heads belong to one rank.
    parts = x.reshape(batch, degree, -1, part, width).movedim(1, 0)
    return _exchange(parts, group).movedim(0, 2).flatten(2, 3)  # by the owner of the positions


def _to_positions(x: Tensor, group: dist.ProcessGroup, degree: int) -> Tensor:
    batch, heads, _, width = x.shape
    # `[degree, batch, heads, part, width]`: consecutive positions belong to one rank.
    parts = x.reshape(batch, heads, degree, -1, width).movedim(2, 0)
    return _exchange(parts, group).movedim(0, 1).flatten(1, 2)  # by the owner of the heads


def _exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send part s of the first dimension to rank s of as many consecutive ranks, and return the parts received.

    The parts received are in the order of the ranks. Other ranks of the group get nothing, which needs no further
    group.
    """
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    degree, size = len(parts), group_size(group)
    sizes = None
    if degree < size:
        first = index_in_group(group) // degree * degree
        sizes = [sent[0].numel() if first <= rank < first + degree else 0 for rank in range(size)]
    dist.all_to_all_single(received.view(-1), sent.view(-1), sizes, sizes, group=group)
    return received
