"""Cross entropy of a linear layer over a vocabulary, without a copy of the logits in fp32.

The logits exist once, in the type of the products, and their gradient takes their place. Whole logits are kept for the
backward pass. In chunks of rows, the forward pass computes the gradients too, if all losses have the same gradient: the
backward pass multiplies them by it (Hsu et al. 2024, arXiv:2410.10989). Else, chunks are computed again.

`torch.nn.functional.linear_cross_entropy` is not used. It is missing before torch 2.13, cannot sum over tensor ranks,
and takes one gradient for all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainer.features.chunked_head.rows import losses_and_gradients_, losses_of, write_gradients_
from trainer.parallel.dtypes import NARROW, at_least_fp32, computes_on_cpu, product_in_fp32
from trainer.parallel.tensor.cross_entropy import VocabularyCut


class LinearLayer(NamedTuple):
    """The layer: this rank's `weight` `[ceil(vocabulary / tp), hidden]`, and its `bias` or None."""

    weight: Tensor
    bias: Tensor | None


class Passes(NamedTuple):
    """The way of the passes.

    Attributes:
        rows: the maximum number of rows with logits in memory.
        sums: whether all losses have the same gradient, as those of a sum.
        keeps: whether the backward pass may run again, as for schedules that split it: it then copies the logits.
    """

    rows: int
    sums: bool = False
    keeps: bool = False


def linear_cross_entropy(x: Tensor, layer: LinearLayer, labels: Tensor, cut: VocabularyCut, passes: Passes) -> Tensor:
    """Return the losses of rows as `vocab_parallel_cross_entropy` of `x @ weight.T + bias`.

    Products are in the type of `x`, and all else in fp32 at least. Each rank of `cut.group` must call this function
    with the same `x`, with `f` applied to it. Columns beyond the vocabulary are padding.

    Args:
        x: the input `[rows, hidden]`.
        labels: integer labels `[rows]`, or the ignored label; equal on all ranks.

    Returns:
        The losses `[rows]` in fp32 (fp64 for fp64 inputs), equal on all ranks.

    Raises:
        RuntimeError: a label is neither ignored nor in the vocabulary. In the kernel for GPUs, its loss is NaN.
    """
    labels = labels.long().contiguous()
    chunks = _chunks(len(x), passes.rows)
    is_trained = any(one is not None and one.requires_grad for one in layer)
    # Each row of a frozen layer has a gradient of its own. In fp16, small gradients need the scale of the loss.
    is_ahead = x.dtype != NARROW and (not is_trained or (passes.sums and len(chunks) > 1))
    function = _GradientsAhead if is_ahead else _GradientsLater
    result = function.apply(x, *layer, labels, cut, chunks, passes.keeps)  # type: ignore[no-untyped-call]
    return cast(Tensor, result)


class _Logits(nn.Module):
    """The logits of rows; a module, because plans count one in a backward pass as recomputed."""

    def forward(self, x: Tensor, layer: LinearLayer) -> Tensor:
        return F.linear(x, *layer)


_logits = _Logits()


class _Gradients:
    """The gradients of the inputs and of a layer, from those of logits.

    Args:
        layer: the layer in the type of the inputs.
        needed: whether inputs, weight and bias have a gradient.
        is_wide: whether sums over rows are in fp32 at least.
    """

    def __init__(self, x: Tensor, layer: LinearLayer, needed: Sequence[bool], is_wide: bool) -> None:
        self._inputs, self._layer, self._needed, self._is_wide = x, layer, needed, is_wide
        self._of_x: list[Tensor] = []
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    @property
    def x(self) -> Tensor | None:
        return _joined(self._of_x) if self._of_x else None

    def add(self, rows: slice, slopes: Tensor) -> None:
        """Add the gradients of rows by those of their logits `[rows, columns]`."""
        if self._needed[0]:
            self._of_x.append(slopes @ self._layer.weight)
        if self._needed[1]:
            self.weight = _sum_with(self.weight, slopes.t(), self._inputs[rows], self._is_wide)
        if self._needed[2]:
            own = slopes.sum(0, dtype=at_least_fp32(slopes[:0]).dtype)
            own = own if self._is_wide else own.to(slopes.dtype)
            self.bias = own if self.bias is None else self.bias.add_(own)


def _sum_with(total: Tensor | None, a: Tensor, b: Tensor, is_wide: bool) -> Tensor:
    """Return the sum of `a @ b` and `total`, which may change; with `is_wide` in fp32 at least."""
    if not is_wide or a.dtype.itemsize > 2:
        return a @ b if total is None else total.addmm_(a, b)
    if total is None:
        return product_in_fp32(a, b)
    if computes_on_cpu(a):
        return total.addmm_(a.float(), b.float())
    return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


class _GradientsAhead(torch.autograd.Function):
    """Gradients in the forward pass, for losses with the gradient 1; those of a layer take that of the first loss."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, cut: VocabularyCut,
        chunks: Sequence[slice], keeps: bool,
    ) -> Tensor:  # fmt: skip
        losses, needed = [], ctx.needs_input_grad[:3]
        with torch.autocast(x.device.type, enabled=False):
            layer = _in_type_of(x, weight, bias)
            gradients = _Gradients(x, layer, needed, is_wide=True)
            for rows in chunks:
                logits = F.linear(x[rows], *layer)
                losses.append(losses_and_gradients_(logits, labels[rows], cut))
                gradients.add(rows, logits)
        ctx.save_for_backward(gradients.x, gradients.weight, gradients.bias)
        ctx.types = _types(weight, bias)
        return _joined(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_x, *of_layer = ctx.saved_tensors
        own = None if of_x is None else (of_x * grad.unsqueeze(1)).to(of_x.dtype)
        # In place, so a second backward pass is an error of torch.
        scaled = [None if one is None else one.mul_(grad[0]) for one in of_layer]
        return own, *_in_types(scaled, ctx.types), *[None] * 4


class _GradientsLater(torch.autograd.Function):
    """Gradients in the backward pass, in the memory of the logits; several chunks compute their logits again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, cut: VocabularyCut,
        chunks: Sequence[slice], keeps: bool,
    ) -> Tensor:  # fmt: skip
        losses, statistics = [], []
        with torch.autocast(x.device.type, enabled=False):
            layer = _in_type_of(x, weight, bias)
            for rows in chunks:
                logits = F.linear(x[rows], *layer)
                loss, found = losses_of(logits, labels[rows], cut)
                losses.append(loss)
                statistics.append(found)
        ctx.save_for_backward(x, *layer, labels, logits if len(chunks) == 1 else None, *statistics)
        ctx.cut, ctx.chunks, ctx.keeps, ctx.types = cut, chunks, keeps, _types(weight, bias)
        return _joined(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, labels, logits, *statistics = ctx.saved_tensors
        layer, grad = LinearLayer(weight, bias), grad.contiguous()
        # Sums in fp16 may leave its range. One product in bf16 has the numbers of autocast, wherever weights are cast.
        is_wide = len(ctx.chunks) > 1 or x.dtype == NARROW
        gradients = _Gradients(x, layer, ctx.needs_input_grad[:3], is_wide)
        if logits is not None and ctx.keeps:
            logits = logits.clone()
        for rows, found in zip(ctx.chunks, statistics, strict=True):
            slopes = _logits(x[rows], layer) if logits is None else logits
            write_gradients_(slopes, labels[rows], found, grad[rows], ctx.cut)
            gradients.add(rows, slopes)
        of_layer = [gradients.weight, gradients.bias]
        return gradients.x, *(of_layer if x.dtype == NARROW else _in_types(of_layer, ctx.types)), *[None] * 4


def _chunks(num_rows: int, most: int) -> list[slice]:
    """Return chunks of rows, of about equal sizes."""
    size = max(1, -(-num_rows // max(1, -(-num_rows // most))))
    return [slice(first, min(first + size, num_rows)) for first in range(0, max(1, num_rows), size)]


def _joined(parts: list[Tensor]) -> Tensor:
    """Return the rows of all chunks; those of one are not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _in_type_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> LinearLayer:
    return LinearLayer(weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _types(weight: Tensor, bias: Tensor | None) -> tuple[torch.dtype, torch.dtype]:
    return weight.dtype, weight.dtype if bias is None else bias.dtype


def _in_types(tensors: Sequence[Tensor | None], types: Sequence[torch.dtype]) -> list[Tensor | None]:
    return [None if tensor is None else tensor.to(own) for tensor, own in zip(tensors, types, strict=True)]
