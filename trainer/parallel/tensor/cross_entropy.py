"""Cross entropy and argmax of logits that are sharded over the vocabulary on the tensor axis, and never gathered.

For each row, one all-reduce exchanges the maximum, and another one the sum of exponentials and the logit of the label.
The backward pass needs no communication (Shoeybi et al. 2019, arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.parallel.dtypes import at_least_fp32
from trainer.parallel.groups import Group, group_size, index_in_group
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.parallel.shards.slices import bounds_of_part


@dataclass(frozen=True)
class VocabularyCut:
    """The split of logits over a vocabulary of `size` columns: each rank of `group` has `[*, ceil(size / ranks)]`.

    With a `group` of None, each rank has all columns.
    """

    group: Group
    size: int


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, group: Group, vocab_size: int, reduction: Literal["none", "sum"] = "sum"
) -> Tensor:
    """Return `F.cross_entropy` of the whole logits, computed in fp32 at least; the gradient has the logits' type.

    If the degree does not divide the vocabulary, the last ranks have padded columns. These count as minus infinity and
    have a gradient of zero. All ranks must compute their logits from the same input, with `f` applied to it.

    Args:
        logits: this rank's columns `[*, ceil(vocab / tp)]`, not gathered ones.
        labels: integer labels `[*]`, or `IGNORED_LABEL`; equal on all ranks.
        vocab_size: the number of columns of the whole logits, without padding.
        reduction: `none` for losses `[*]`, with zero for ignored rows; `sum` for their sum, a scalar.

    Returns:
        The loss in fp32 (fp64 for fp64 logits), equal on all ranks.

    Raises:
        IndexError: a label is neither ignored nor in the vocabulary; raised on every rank. A group with several
            ranks raises RuntimeError; a GPU fails with a device-side assertion.
    """
    size, columns = group_size(group), logits.shape[-1]
    assert columns == -(-vocab_size // size), (
        f"{columns} columns are not the part of a vocabulary of {vocab_size} on {size} ranks: gathered logits?"
    )
    assert labels.shape == logits.shape[:-1], f"labels {tuple(labels.shape)} for logits {tuple(logits.shape)}"
    assert reduction in ("none", "sum"), f"no reduction {reduction!r}"
    labels = labels.long()
    if group is None or size == 1:
        rows = at_least_fp32(logits).reshape(-1, columns)
        losses = F.cross_entropy(rows, labels.reshape(-1), ignore_index=IGNORED_LABEL, reduction=reduction)
        return losses.view(labels.shape) if reduction == "none" else losses
    losses = cast(Tensor, _VocabParallelCrossEntropy.apply(logits, labels, group, vocab_size))  # type: ignore[no-untyped-call]
    return losses if reduction == "none" else losses.sum()


@torch.no_grad()
def vocab_parallel_argmax(logits: Tensor, group: Group, vocab_size: int) -> Tensor:
    """Return `argmax` over the last dimension of the whole logits: the first of equal ones, never a padded column.

    Args:
        logits: this rank's columns `[*, ceil(vocab / tp)]`.
        vocab_size: the number of columns of the whole logits, without padding.

    Returns:
        The column of each row, int64 `[*]`, equal on all ranks.
    """
    if group is None or group_size(group) == 1:
        return logits.argmax(-1)
    start, stop = bounds_of_part(vocab_size, index_in_group(group), group_size(group))
    if start < stop:
        best_here, column = logits[..., : stop - start].max(-1)
    else:  # this rank has padded columns only
        best_here = logits.new_full(logits.shape[:-1], -torch.inf)
        column = torch.zeros_like(best_here, dtype=torch.int64)
    # The collective changes its tensor, and `best_here` is compared with the result.
    best = at_least_fp32(best_here).clone()
    dist.all_reduce(best, dist.ReduceOp.MAX, group)
    # Ranks with a smaller maximum name a column beyond all, so the minimum is the first of the largest.
    place = (column + start).masked_fill_(best_here != best, vocab_size)
    dist.all_reduce(place, dist.ReduceOp.MIN, group)
    return place


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Cross entropy with a backward pass that recomputes the softmax.

    The forward pass saves the logits, which exist anyway, and three numbers per row.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup, vocab_size: int) -> Tensor:
        num_columns = logits.shape[-1]
        start, stop = bounds_of_part(vocab_size, index_in_group(group), group_size(group))
        known = logits[..., : stop - start]  # without padded columns, which count as minus infinity
        maximum = known.amax(-1) if start < stop else known.new_full(labels.shape, -torch.inf)
        # A rank with padded columns only joins both collectives too; its maximum is -inf, and its sums are 0.
        maximum = at_least_fp32(maximum)
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group)
        shifted = known - maximum.unsqueeze(-1)  # in the type of the maximum

        ignored = labels == IGNORED_LABEL
        target, elsewhere = target_columns(labels, ignored, start, num_columns, vocab_size)
        at_label = at_least_fp32(logits.gather(-1, target.unsqueeze(-1))).squeeze(-1) - maximum
        # One collective for both numbers: the ranks without the label add 0 to its logit.
        summed = torch.stack([at_label.masked_fill_(elsewhere, 0.0), shifted.exp_().sum(-1)])
        dist.all_reduce(summed, group=group)
        at_label, sum_of_exponentials = summed.unbind()
        log_sum = sum_of_exponentials.log()
        # The maximum and the logarithm are saved separately: with a large maximum, their sum would lose digits.
        ctx.save_for_backward(logits, labels, maximum, log_sum)
        ctx.bounds, ctx.vocab_size = (start, stop), vocab_size
        return (log_sum - at_label).masked_fill_(ignored, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, maximum, log_sum = ctx.saved_tensors
        start, stop = ctx.bounds
        num_columns = logits.shape[-1]
        # (softmax - target), times the gradient of the loss of each row
        slopes = logits - maximum.unsqueeze(-1)
        slopes.sub_(log_sum.unsqueeze(-1)).exp_()
        ignored = labels == IGNORED_LABEL
        target, elsewhere = target_columns(labels, ignored, start, num_columns, ctx.vocab_size)
        shares = maximum.new_full(labels.shape, -1.0).masked_fill_(elsewhere, 0.0)
        slopes.scatter_add_(-1, target.unsqueeze(-1), shares.unsqueeze(-1))
        slopes.mul_(grad.masked_fill(ignored, 0.0).unsqueeze(-1))
        slopes[..., stop - start :] = 0.0
        return slopes.to(logits.dtype), None, None, None


def target_columns(
    labels: Tensor, ignored: Tensor, start: int, num_columns: int, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Return the column of each row's label on this rank, and a mask of the rows without one, which get column 0.

    A label outside of the vocabulary gets a column that no rank has, so torch refuses to gather it.
    """
    unknown = ((labels < 0) | (labels >= vocab_size)) & ~ignored
    elsewhere = (labels < start) | (labels >= start + num_columns) | ignored
    return (labels - start).masked_fill(elsewhere, 0).masked_fill(unknown, num_columns), elsewhere
