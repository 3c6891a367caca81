"""Collectives with a backward pass, for tensor parallelism and for sequences that are sharded over ranks.

They are those of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053) and of its sequence parallelism (Korthikanti et
al. 2022, arXiv:2205.05198). The ranks r of a group have x_r and compute y_r; dx_r and dy_r are gradients. `[r]` selects
the positions of rank r; `cat` joins those of all ranks. dx_r has the shape of x_r, and dy_r that of y_r.

| function               | forward               | backward                | y is used for                  |
|------------------------|-----------------------|-------------------------|--------------------------------|
| `copy_to_group`        | y_r = x_r             | dx_r = sum_s dy_s       | work that ranks share          |
| `reduce_from_group`    | y_r = sum_s x_s       | dx_r = dy_r             | work that every rank repeats   |
| `reduce_in_place`      | y_r = sum_s x_s       | dx_r = dy_r             | work that every rank repeats   |
| `gather_sequence`      | y_r = cat_s x_s       | dx_r = (sum_s dy_s)[r]  | work that ranks share          |
| `scatter_sum_sequence` | y_r = (sum_s x_s)[r]  | dx_r = cat_s dy_s       | work on each rank's positions  |
| `split_sequence`       | y_r = x_r[r]          | dx_r = cat_s dy_s       | work on each rank's positions  |
| `join_sequence`        | y_r = cat_s x_s       | dx_r = dy_r[r]          | work that every rank repeats   |

Each rank has `ceil(total / size)` positions of a sequence; the last ranks may have fewer or none (5 positions on 4
ranks: 2, 2, 1, 0). Parts are padded with zeros only for the collective.

Tensors keep their type, so autocast also decides the type of the sums. `in_product_type` rounds the inputs of matrix
products before they are sent. Inputs and gradients are never changed, except by `reduce_in_place`. Without a group, or
with one rank, each function returns its input.

A collective has the parts of the ranks one after another. If all dimensions before that of the positions have one
element, such as the batch of a single row, this is the layout of the sequence, and nothing is copied. Otherwise the
parts are copied once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from trainer.parallel.groups import Group, group_size, index_in_group
from trainer.parallel.shards.slices import bounds_of_part

Begun = list[Callable[[], object]]
"""The waits for messages that were begun. The backward pass adds that for the gradient of an input."""


def in_product_type(x: Tensor) -> Tensor:
    """Return `x` in autocast's type of matrix products, for products only; unchanged without autocast.

    Autocast would round it just before each product. Rounded earlier, `x` and its gradient take half of the bytes when
    they are sent.
    """
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) and x.dtype == torch.float32 else x


def copy_to_group(x: Tensor, group: Group, begun: Begun | None = None) -> Tensor:
    """Return `x`, which is equal on all ranks (`f` in Shoeybi et al. 2019, section 3).

    Args:
        begun: gets the wait for the sum of the gradients, which is not complete before; None: the sum is waited for.
    """
    return _apply(x, group, "copy_to_group", begun=begun)


def reduce_from_group(x: Tensor, group: Group) -> Tensor:
    """Return the sum over the ranks (`g` in Shoeybi et al. 2019, section 3); the gradient is equal on all ranks."""
    return _apply(x, group, "reduce_from_group")


def reduce_in_place(x: Tensor, group: Group) -> Tensor:
    """Return the sum as `reduce_from_group`, in the memory of `x`, which the caller must not use again.

    `x` must be the result of an operation that does not keep it for the backward pass, such as a product. If selective
    checkpointing keeps it, or it is not contiguous, the sum has memory of its own.
    """
    return _apply(x, group, "reduce_in_place")


def gather_sequence(x: Tensor, group: Group, dim: int, total: int, begun: Begun | None = None) -> Tensor:
    """Return all positions, `[..., total, ...]`, from this rank's (`g` in Korthikanti et al. 2022, section 4.2.2).

    For `begun` see `copy_to_group`.
    """
    return _apply(x, group, "gather_sequence", dim, total, begun=begun)


def scatter_sum_sequence(x: Tensor, group: Group, dim: int) -> Tensor:
    """Return this rank's positions of the sum of `x`, `[..., total, ...]` (`g` with a bar in Korthikanti et al.)."""
    return _apply(x, group, "scatter_sum_sequence", dim, x.shape[dim])


def split_sequence(x: Tensor, group: Group, dim: int) -> Tensor:
    """Return this rank's positions of `x`, `[..., total, ...]`, which is equal on all ranks; the result is a view."""
    return _apply(x, group, "split_sequence", dim, x.shape[dim])


def join_sequence(x: Tensor, group: Group, dim: int, total: int) -> Tensor:
    """Return all positions, `[..., total, ...]`, from this rank's.

    For work that every rank repeats, such as a pooler: dy is equal on all ranks, so its sum would be too large by a
    factor of the degree.
    """
    return _apply(x, group, "join_sequence", dim, total)


def _apply(x: Tensor, group: Group, name: str, *args: int, begun: Begun | None = None) -> Tensor:
    if group is None or group_size(group) == 1:
        return x
    return cast(Tensor, _Collective.apply(x, group, name, begun, *args))  # type: ignore[no-untyped-call]


class _Collective(torch.autograd.Function):
    """A collective of `_FORWARD_AND_BACKWARD`; both passes have the same further arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, name: str, begun: Begun | None, *args: int) -> Tensor:
        ctx.group, ctx.name, ctx.args = group, name, args
        ctx.begun = {} if begun is None else {"begun": begun}
        y = _FORWARD_AND_BACKWARD[name][0](x, group, *args)
        if y is x:
            ctx.mark_dirty(x)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_x = _FORWARD_AND_BACKWARD[ctx.name][1](grad, ctx.group, *ctx.args, **ctx.begun)
        return of_x, None, None, None, *[None] * len(ctx.args)


def _send(collective: Callable[..., Any], *tensors: Tensor, group: dist.ProcessGroup, begun: Begun | None) -> None:
    """Call a collective; with `begun`, add its wait there, and do not wait."""
    if begun is None:
        collective(*tensors, group=group)
    else:
        begun.append(collective(*tensors, group=group, async_op=True).wait)


def _sum(x: Tensor, group: dist.ProcessGroup, begun: Begun | None = None) -> Tensor:
    """Return the sum over the ranks in new memory, since `x` may have other readers."""
    total = x.clone(memory_format=torch.contiguous_format)
    _send(dist.all_reduce, total, group=group, begun=begun)
    return total


def _sum_in_place(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    # A compiler makes the sum in place by itself.
    if torch.compiler.is_compiling() or not x.is_contiguous() or _keeps_products():
        return _sum(x, group)
    dist.all_reduce(x, group=group)
    return x


def _keeps_products() -> bool:
    """Return whether selective checkpointing keeps products; their recomputation would sum a kept sum again."""
    kinds = _CachingTorchDispatchMode | _CachedTorchDispatchMode
    return any(isinstance(mode, kinds) for mode in _get_current_dispatch_mode_stack())


def _slice(x: Tensor, group: dist.ProcessGroup, dim: int, total: int) -> Tensor:
    start, stop = bounds_of_part(total, index_in_group(group), group_size(group))
    return x.narrow(dim, start, stop - start)


def _part_shape(x: Tensor, dim: int, total: int, size: int) -> list[int]:
    """Return the shape of each padded part."""
    shape = list(x.shape)
    shape[dim] = -(-total // size)
    return shape


def _gather(x: Tensor, group: dist.ProcessGroup, dim: int, total: int) -> Tensor:
    size, dim = group_size(group), dim % x.dim()
    start, stop = bounds_of_part(total, index_in_group(group), size)
    assert x.shape[dim] == stop - start, f"this rank holds {x.shape[dim]} of {total} positions, not {stop - start}"
    shape = _part_shape(x, dim, total, size)
    sent = x.contiguous()
    # The collective of one tensor needs parts of equal size, so a shorter part is padded on its way.
    if sent.shape[dim] < shape[dim]:
        sent = x.new_zeros(shape)
        sent.narrow(dim, 0, x.shape[dim]).copy_(x)
    # The ranks are the outermost dimension of the collective; only the last parts are padded.
    if math.prod(shape[:dim]) == 1:
        joined = x.new_empty([*shape[:dim], size * shape[dim], *shape[dim + 1 :]])
        all_gather_single()(joined.view(-1), sent.view(-1), group=group)
        return joined if joined.shape[dim] == total else joined.narrow(dim, 0, total)
    received = x.new_empty(size, *shape)
    all_gather_single()(received.view(-1), sent.view(-1), group=group)
    bounds = (bounds_of_part(total, index, size) for index in range(size))
    return torch.cat(
        [part.narrow(dim, 0, stop - start) for part, (start, stop) in zip(received, bounds, strict=True)], dim
    )


def _scatter_sum(x: Tensor, group: dist.ProcessGroup, dim: int, total: int, begun: Begun | None = None) -> Tensor:
    size, dim = group_size(group), dim % x.dim()
    shape = _part_shape(x, dim, total, size)
    num_whole, rest = divmod(total, max(shape[dim], 1))
    # Parts without padding, as `[rank, ...]`; a view if nothing is outside of the ranks.
    parts = x.narrow(dim, 0, total - rest).unflatten(dim, (num_whole, shape[dim])).movedim(dim, 0)  # type: ignore[no-untyped-call]
    if num_whole == size:
        sent = parts.contiguous()
    else:
        sent = x.new_empty(size, *shape)
        sent[:num_whole].copy_(parts)
        sent[num_whole:].zero_()
        sent.select(0, num_whole).narrow(dim, 0, rest).copy_(x.narrow(dim, total - rest, rest))
    received = x.new_empty(shape)
    _send(reduce_scatter_single(), received.view(-1), sent.view(-1), group=group, begun=begun)
    start, stop = bounds_of_part(total, index_in_group(group), size)
    return received if stop - start == shape[dim] else received.narrow(dim, 0, stop - start)


_FORWARD_AND_BACKWARD: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "copy_to_group": (lambda x, _: x.view_as(x), _sum),  # autograd needs another tensor than the input
    # Every rank repeats the work on y, so its dy is whole already.
    "reduce_from_group": (_sum, lambda grad, _: grad),
    "reduce_in_place": (_sum_in_place, lambda grad, _: grad),
    "gather_sequence": (_gather, _scatter_sum),
    "scatter_sum_sequence": (_scatter_sum, _gather),
    "split_sequence": (_slice, _gather),
    "join_sequence": (_gather, _slice),
}
"""The two passes of each function of the table above."""


def all_gather_single() -> Callable[..., Any]:
    """Return torch's all-gather into one tensor; torch 2.13 renamed it and warns at the old name."""
    return cast(Callable[..., Any], getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)


def reduce_scatter_single() -> Callable[..., Any]:
    """Return torch's reduce-scatter from one tensor; torch 2.13 renamed it and warns at the old name."""
    return cast(Callable[..., Any], getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)
