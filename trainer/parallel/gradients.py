"""Sums of gradients over ranks, after a backward pass in which no library does it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.parallel.communication import Group
from trainer.parallel.whole import local_part

_BUCKET_BYTES = 25 * 2**20


@torch.no_grad()
def sum_gradients_(parameters: Iterable[nn.Parameter], group: Group, sent_in: torch.dtype | None = None) -> None:
    """Sum the gradients over the ranks of `group`, in place, one bucket at a time.

    The same parameters must have gradients on all ranks. They are sent in the type `sent_in`; None: in their own.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for bucket in _buckets(gradients):
        change_as_one_(bucket, lambda flat: dist.all_reduce(flat, group=group), sent_in)


def _buckets(gradients: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and (size + gradient.nbytes > _BUCKET_BYTES or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket


@torch.no_grad()
def round_gradients_(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Round the gradients to `dtype`, in place, as if they were sent in this type; their own type stays."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.copy_(parameter.grad.to(dtype))


def change_as_one_(
    tensors: Sequence[Tensor], change_: Callable[[Tensor], object], dtype: torch.dtype | None = None
) -> None:
    """Apply `change_` to all tensors as one flat vector of type `dtype` (None: their own), in place."""
    flat = torch.cat([tensor.reshape(-1).to(dtype or tensor.dtype) for tensor in tensors])
    change_(flat)
    for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


class TiedGradients:
    """Parameters with copies on several pipeline stages; the gradient is the sum over the copies.

    The copies must start equal; equal gradients keep them equal.

    Args:
        copies: this rank's copies, by the name of the parameter in the whole model.
        groups: the ranks that hold copies, by that name; None for this rank alone.
        sent_in: the type in which gradients are sent; None: their own.
    """

    def __init__(
        self,
        copies: Mapping[str, Sequence[nn.Parameter]],
        groups: Mapping[str, Group],
        sent_in: torch.dtype | None = None,
    ) -> None:
        self._sent_in = sent_in
        self._copies = {name: list(copies[name]) for name in sorted(copies)}  # all ranks in the same order
        self._groups = dict(groups)

    @torch.no_grad()
    def sum_(self) -> None:
        """Sum the gradients of all copies, in place; they may be sharded, alike on all stages."""
        for name, copies in self._copies.items():
            for parameter in copies:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            parts = [local_part(parameter.grad) for parameter in copies if parameter.grad is not None]
            total = parts[0].clone(memory_format=torch.contiguous_format)
            for part in parts[1:]:
                total += part
            if (group := self._groups[name]) is not None:
                total = total.to(self._sent_in or total.dtype)
                dist.all_reduce(total, group=group)
            for part in parts:
                part.copy_(total)
