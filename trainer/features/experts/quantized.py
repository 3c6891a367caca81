"""Products with frozen matrices of experts that are held in parts, such as codes with scales."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.parallel.stored_in_parts import StoredInParts


def rows_times_stored(rows: Tensor, weight: StoredInParts, sizes: list[int], transposed: bool) -> Tensor:
    """Return rows, sorted by expert, multiplied by the matrix of their expert, which is decoded for its product only.

    Args:
        weight: the matrices `[experts, out, in]`, or `[experts, in, out]` if `transposed`; its tensors have the experts
            as their first dimension.
        sizes: the rows of each expert.
    """
    parts = dict(weight.named_parameters())
    return cast(
        Tensor,
        _EachStored.apply(rows, weight, sizes, transposed, tuple(parts), *parts.values()),  # type: ignore[no-untyped-call]
    )


class _EachStored(torch.autograd.Function):
    """The backward pass decodes the matrices again, so that autograd keeps the parts only."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: StoredInParts,
        sizes: list[int],
        transposed: bool,
        names: tuple[str, ...],
        *parts: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(*parts)
        ctx.weight = weight, sizes, transposed, names
        return _products(rows, ctx.weight, parts, not transposed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        parts = ctx.saved_tensors  # once, because recomputation frees them when they are read
        of_rows = None
        if ctx.needs_input_grad[0]:
            of_rows = _products(gradient.contiguous(), ctx.weight, parts, ctx.weight[2])
        return of_rows, *(None for _ in range(4 + len(parts)))


def _products(rows: Tensor, stored: tuple[Any, ...], parts: tuple[Tensor, ...], turned: bool) -> Tensor:
    """Return the rows of each expert, multiplied by its matrix, or by the transposed matrix if `turned`."""
    weight, sizes, _, names = stored
    output = rows.new_empty(len(rows), weight.shape[1 if turned else 2])
    for number, (part, out) in enumerate(zip(torch.split(rows, sizes), torch.split(output, sizes), strict=True)):
        if len(part):
            own = {name: tensor[number : number + 1] for name, tensor in zip(names, parts, strict=True)}
            matrix = weight.decoded(rows.dtype, own)[0]
            torch.mm(part, matrix.t() if turned else matrix, out=out)
    return output
