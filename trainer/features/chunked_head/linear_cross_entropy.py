"""Cross entropy of a linear layer over a vocabulary, in blocks of the vocabulary: the logits are never held whole.

One pass over the blocks gives each row's loss and the gradient of its input, as attention does for its values (Rabe and
Staats 2021, arXiv:2112.05682): both are sums over the vocabulary that are rescaled when a larger logit appears. Only
the gradient of a trained weight needs the logits again, because it needs the whole sum first (Wijmans et al. 2024,
arXiv:2411.09009).

`torch.nn.functional.linear_cross_entropy` is not used. It is missing before torch 2.13, cannot sum over tensor ranks,
and takes one gradient for all rows. Its chunks of rows add a matrix of the weight's size for each chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainer.parallel.dtypes import at_least_fp32, product_in_fp32
from trainer.parallel.groups import group_size, index_in_group
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.parallel.shards.slices import bounds_of_part
from trainer.parallel.tensor.cross_entropy import VocabularyCut, target_columns


class LinearLayer(NamedTuple):
    """The layer: this rank's `weight` `[ceil(vocabulary / tp), hidden]`, and its `bias` or None."""

    weight: Tensor
    bias: Tensor | None


def linear_cross_entropy(
    x: Tensor, layer: LinearLayer, labels: Tensor, cut: VocabularyCut, num_columns: int, finds_best: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the losses of rows as `vocab_parallel_cross_entropy` of `x @ weight.T + bias`, and if each is right.

    Products are in the type of `x`, and all else in fp32 at least. Each rank of `cut.group` must call this function
    with the same `x`, with `f` applied to it. Columns beyond the vocabulary are padding.

    Args:
        x: the input `[rows, hidden]`.
        labels: integer labels `[rows]`, or `IGNORED_LABEL`; equal on all ranks.
        num_columns: the maximum number of columns of a block.
        finds_best: whether to compare each label with the first of the largest logits; else, no row is right.

    Returns:
        The losses and 1 for right rows, else 0, both `[rows]` in fp32 (fp64 for fp64 inputs), equal on all ranks.

    Raises:
        RuntimeError: a label is neither ignored nor in the vocabulary; a GPU fails with a device-side assertion.
    """
    result = _LinearCrossEntropy.apply(x, *layer, labels.long(), cut, num_columns, finds_best)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, Tensor], result)


class _Block(NamedTuple):
    first: int
    last: int
    logits: Tensor
    weight: Tensor
    target: Tensor
    """The column of each row's label in the block `[rows, 1]`; 0 if it is elsewhere."""
    has_label: Tensor


class _Logits(nn.Module):
    """The logits of a block in fp32 at least; a module, because plans count one in a backward pass as recomputed."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return at_least_fp32(F.linear(x, weight, bias))


_logits = _Logits()


def _blocks(x: Tensor, layer: LinearLayer, labels: Tensor, cut: VocabularyCut, num_columns: int) -> Iterator[_Block]:
    """Yield the blocks of this rank's columns, without padding; their logits are fresh, and in fp32 at least."""
    start, stop = bounds_of_part(cut.size, index_in_group(cut.group), group_size(cut.group))
    ignored = labels == IGNORED_LABEL
    for first in range(0, stop - start, num_columns):
        last = min(first + num_columns, stop - start)
        weight = layer.weight[first:last].to(x.dtype)
        bias = None if layer.bias is None else layer.bias[first:last].to(x.dtype)
        logits = _logits(x, weight, bias)
        target, elsewhere = target_columns(labels, ignored, start + first, last - first, cut.size)
        yield _Block(first, last, logits, weight, target.unsqueeze(1), ~elsewhere)


class _LinearCrossEntropy(torch.autograd.Function):
    """For each row with logits z and label y, over the other columns v: m = max z_v and s = sum exp(z_v - m).

    With d = log s + m - z_y and q = sigmoid(d) = 1 - p_y, the loss is log(1 + exp d). The gradient of z_y is -q, and
    that of z_v is exp(z_v - m) q / s.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        cut: VocabularyCut,
        num_columns: int,
        finds_best: bool,
    ) -> tuple[Tensor, Tensor]:
        layer = LinearLayer(weight, bias)
        ignored = labels == IGNORED_LABEL
        rows = at_least_fp32(x.new_zeros(len(labels)))
        # The lowest number in place of -inf: a block may have the label's column only, and -inf minus -inf is NaN.
        maximum, sums, at_label = torch.full_like(rows, torch.finfo(rows.dtype).min), rows.clone(), rows.clone()
        place = torch.full_like(labels, cut.size)
        start, _ = bounds_of_part(cut.size, index_in_group(cut.group), group_size(cut.group))
        slope = torch.zeros_like(x, dtype=rows.dtype) if ctx.needs_input_grad[0] else None
        with torch.autocast(x.device.type, enabled=False):
            for block in _blocks(x, layer, labels, cut, num_columns):
                logits, found = block.logits, block.logits.gather(1, block.target)
                at_label = torch.where(block.has_label, found.squeeze(1), at_label)
                # z_y leaves the sums: a row with p_y near 1 would lose its digits in 1 - p_y.
                logits.scatter_(1, block.target, found.masked_fill(block.has_label.unsqueeze(1), -torch.inf))
                if finds_best:
                    top, column = logits.max(1)
                    place = torch.where(top > maximum, column + start + block.first, place)
                else:
                    top = logits.amax(1)
                larger = torch.maximum(maximum, top)
                shrinks, maximum = (maximum - larger).exp_(), larger  # makes earlier sums relative to the new maximum
                exponentials = logits.sub_(maximum.unsqueeze(1)).exp_()
                sums = sums * shrinks + exponentials.sum(1)
                if slope is not None:
                    _add_product_(slope.mul_(shrinks.unsqueeze(1)), exponentials.to(x.dtype), block.weight)
            here = maximum
            if group_size(cut.group) > 1:
                maximum = here.clone()
                dist.all_reduce(maximum, dist.ReduceOp.MAX, cut.group)
                # The sums become relative to the maximum of all ranks; a rank without the label has 0 for its logit.
                shared = torch.stack([sums * (here - maximum).exp_(), at_label])
                dist.all_reduce(shared, group=cut.group)
                sums, at_label = shared.unbind()
            # With a large maximum, its sum with the logarithm would lose digits.
            distance = (maximum - at_label) + sums.log()
            wrong = torch.sigmoid(distance).masked_fill_(ignored, 0.0)
            share = torch.where(sums == 0, 0.0, wrong / sums)  # a vocabulary of one token has no other column
            if slope is not None:
                slope.mul_((share * (here - maximum).exp_()).unsqueeze(1))
                own, elsewhere = target_columns(labels, ignored, start, len(weight), cut.size)
                slope.addcmul_(
                    weight.index_select(0, own).to(x.dtype), wrong.masked_fill(elsewhere, 0.0).unsqueeze(1), value=-1
                )
            losses = F.softplus(distance).masked_fill_(ignored, 0.0)
            right = rows
            if finds_best:
                if group_size(cut.group) > 1:
                    place = place.masked_fill(here != maximum, cut.size)
                    dist.all_reduce(place, dist.ReduceOp.MIN, cut.group)
                # The maximum is that of the other columns. Of equal logits, the first column wins, as in `argmax`.
                wins = (at_label > maximum) | ((at_label == maximum) & (labels < place))
                right = (wins & ~ignored).to(rows.dtype)
        ctx.save_for_backward(x, weight, bias, labels, maximum, wrong, share, slope)
        ctx.cut, ctx.num_columns = cut, num_columns
        ctx.mark_non_differentiable(right)
        return losses, right

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, labels, maximum, wrong, share, slope = ctx.saved_tensors
        of_x = None if slope is None else (slope * grad.unsqueeze(1)).to(x.dtype)
        is_narrow = x.dtype == torch.float16  # sums over rows may leave its range
        of_weight, of_bias = (
            torch.empty_like(one, dtype=torch.float32 if is_narrow else None) if needed else None
            for one, needed in zip((weight, bias), ctx.needs_input_grad[1:3], strict=True)
        )
        start, stop = bounds_of_part(ctx.cut.size, index_in_group(ctx.cut.group), group_size(ctx.cut.group))
        for of_columns in (of_weight, of_bias):
            if of_columns is not None:
                # Padded columns are in no block, so nothing else writes their gradient.
                of_columns[stop - start :] = 0.0
        if of_weight is not None or of_bias is not None:
            others, at_label = share * grad, -wrong * grad
            for block in _blocks(x, LinearLayer(weight, bias), labels, ctx.cut, ctx.num_columns):
                slopes = block.logits.sub_(maximum.unsqueeze(1)).exp_().mul_(others.unsqueeze(1))
                # A row with its label elsewhere has the target 0, and `where` gives this column its own slope back.
                found = slopes.gather(1, block.target).squeeze(1)
                slopes.scatter_(1, block.target, torch.where(block.has_label, at_label, found).unsqueeze(1))
                if of_weight is not None:
                    rounded = slopes.to(x.dtype).t()
                    of_weight[block.first : block.last] = product_in_fp32(rounded, x) if is_narrow else rounded @ x
                if of_bias is not None:
                    of_bias[block.first : block.last] = slopes.sum(0)
        return of_x, of_weight, of_bias, None, None, None, None


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add `a @ b` in place, without a copy of the product if it has the type of the total."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)
