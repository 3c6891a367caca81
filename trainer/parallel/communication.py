"""Communication that autograd knows: pairs of functions of which each is the backward pass of the other.

The pairs are those of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053: `f` and `g`) and of its sequence parallelism
(Korthikanti et al. 2022, arXiv:2205.05198). What separates them is what the ranks do with the result:

| function               | forward        | backward       | for                                                    |
|------------------------|----------------|----------------|--------------------------------------------------------|
| `copy_to_group` (f)    | identity       | all-reduce     | a whole tensor, before work that is shared out         |
| `reduce_from_group` (g)| all-reduce     | identity       | partial sums, before work that every rank repeats      |
| `gather_sequence`      | all-gather     | reduce-scatter | slices of a sequence, before work that is shared out   |
| `scatter_sum_sequence` | reduce-scatter | all-gather     | partial sums, before work on slices of a sequence      |
| `split_sequence`       | slice          | all-gather     | a whole tensor, before work on slices of a sequence    |
| `join_sequence`        | all-gather     | slice          | slices of a sequence, before work that every rank repeats |

Sequence parallelism cuts `total` positions into parts of `ceil(total / size)`: the last rank that has any may have
fewer, and those after it have none (3 positions on 4 ranks: 1, 1, 1, 0; 5 on 4: 2, 2, 1, 0). A rank holds its own
positions and nothing else; parts are padded with zeros only while they travel.

Tensors travel in the type they have, so that under autocast the sums are taken in the autocast type. No input and no
gradient is written to. Where `group` is None or has one rank every function returns the tensor it was given: no copy
and no communication.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.parallel.slicing import bounds_of_part

Group = dist.ProcessGroup | None


def group_size(group: Group) -> int:
    """Number of ranks in `group`; None is one rank alone."""
    return 1 if group is None else dist.get_world_size(group)


def index_in_group(group: Group) -> int:
    """Place of this rank in `group`."""
    return 0 if group is None else dist.get_rank(group)


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    """`x` of any shape, equal on all ranks, for work that is shared out: its gradients are summed (`f`).

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    return _apply(_CopyToGroup, x, group)


def reduce_from_group(x: Tensor, group: Group) -> Tensor:
    """The sum of the ranks' `x`, of any shape, for work that every rank repeats: its gradient is left as it is (`g`).

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    return _apply(_ReduceFromGroup, x, group)


def gather_sequence(x: Tensor, group: Group, dim: int, total: int) -> Tensor:
    """All `total` positions of a sequence, for work that is shared out: their gradients are summed and cut again.

    Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2 (there called `g`; it takes the place of `f`).

    Args:
        x: this rank's positions, `[..., its part of total, ...]`.
        group: the tensor axis.
        dim: of the positions.
        total: positions of the whole sequence, which the part does not tell.

    Returns:
        `[..., total, ...]`.
    """
    return _apply(_GatherSequence, x, group, dim, total)


def scatter_sum_sequence(x: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's positions of the sum of the ranks' `x`, for work on slices: their gradients are gathered.

    Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2 (there called `g` with a bar).

    Args:
        x: partial sums of the whole sequence, `[..., total, ...]`.
        group: the tensor axis.
        dim: of the positions.

    Returns:
        `[..., its part of total, ...]`.
    """
    return _apply(_ScatterSumSequence, x, group, dim)


def split_sequence(x: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's positions of `x`, which all ranks have, for work on slices: their gradients are gathered.

    Args:
        x: equal on all ranks, `[..., total, ...]`.
        group: the tensor axis.
        dim: of the positions.

    Returns:
        `[..., its part of total, ...]`, a view of `x`.
    """
    return _apply(_SplitSequence, x, group, dim)


def join_sequence(x: Tensor, group: Group, dim: int, total: int) -> Tensor:
    """All `total` positions of a sequence, for work that every rank repeats, such as a pooler: their gradient is cut.

    Every rank has the whole gradient already; to sum it, as `gather_sequence` does, would make it grow by the degree.

    Args:
        x: this rank's positions, `[..., its part of total, ...]`.
        group: the tensor axis.
        dim: of the positions.
        total: positions of the whole sequence, which the part does not tell.

    Returns:
        `[..., total, ...]`.
    """
    return _apply(_JoinSequence, x, group, dim, total)


def _apply(function: type[torch.autograd.Function], x: Tensor, group: Group, *args: int) -> Tensor:
    if group is None or group_size(group) == 1:
        return x
    return cast(Tensor, function.apply(x, group, *args))  # type: ignore[no-untyped-call]


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _sum(grad, ctx.group), None


class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, total: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _gather(x, group, dim, total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _scatter_sum(grad, ctx.group, ctx.dim), None, None, None


class _ScatterSumSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.total = group, dim, x.shape[dim]
        return _scatter_sum(x, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gather(grad, ctx.group, ctx.dim, ctx.total), None, None


class _SplitSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.total = group, dim, x.shape[dim]
        return _slice(x, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gather(grad, ctx.group, ctx.dim, ctx.total), None, None


class _JoinSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, total: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _gather(x, group, dim, total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _slice(grad, ctx.group, ctx.dim), None, None, None


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the ranks' `x`, in new memory: an input or a gradient may have other readers."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _slice(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    start, stop = bounds_of_part(x.shape[dim], index_in_group(group), group_size(group))
    return x.narrow(dim, start, stop - start)


def _part_shape(x: Tensor, dim: int, total: int, size: int) -> list[int]:
    """Shape of the part of each rank while it travels."""
    shape = list(x.shape)
    shape[dim] = -(-total // size)
    return shape


def _gather(x: Tensor, group: dist.ProcessGroup, dim: int, total: int) -> Tensor:
    size, dim = group_size(group), dim % x.dim()
    start, stop = bounds_of_part(total, index_in_group(group), size)
    assert x.shape[dim] == stop - start, f"this rank holds {x.shape[dim]} of {total} positions, not {stop - start}"
    shape = _part_shape(x, dim, total, size)
    sent = x.contiguous()
    if sent.shape[dim] < shape[dim]:
        sent = x.new_zeros(shape)
        sent.narrow(dim, 0, x.shape[dim]).copy_(x)
    received = x.new_empty(size, *shape)
    _all_gather_single()(received.view(-1), sent.view(-1), group=group)
    bounds = (bounds_of_part(total, index, size) for index in range(size))
    return torch.cat(
        [part.narrow(dim, 0, stop - start) for part, (start, stop) in zip(received, bounds, strict=True)], dim
    )


def _scatter_sum(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    size, dim, total = group_size(group), dim % x.dim(), x.shape[dim]
    shape = _part_shape(x, dim, total, size)
    make = x.new_empty if total == size * shape[dim] else x.new_zeros
    sent = make(size, *shape)
    for index, part in enumerate(sent):
        start, stop = bounds_of_part(total, index, size)
        part.narrow(dim, 0, stop - start).copy_(x.narrow(dim, start, stop - start))
    received = x.new_empty(shape)
    _reduce_scatter_single()(received.view(-1), sent.view(-1), group=group)
    start, stop = bounds_of_part(total, index_in_group(group), size)
    return received.narrow(dim, 0, stop - start)


def _all_gather_single() -> Callable[..., Any]:
    """Torch's all-gather into one tensor, which has a new name since torch 2.13 and warns at the old one."""
    return cast(Callable[..., Any], getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)


def _reduce_scatter_single() -> Callable[..., Any]:
    """Torch's reduce-scatter from one tensor, which has a new name since torch 2.13 and warns at the old one."""
    return cast(Callable[..., Any], getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)
