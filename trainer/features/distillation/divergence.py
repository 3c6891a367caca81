"""The Kullback-Leibler divergence of logits from those of a teacher, also sharded over the vocabulary, never gathered.

For each row, one all-reduce exchanges the maxima, and another one three sums. The backward pass needs no communication.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.parallel.dtypes import at_least_fp32
from trainer.parallel.groups import Group, group_size, index_in_group
from trainer.parallel.shards.slices import bounds_of_part


def vocab_parallel_divergence(logits: Tensor, teacher: Tensor, group: Group, size: int, temperature: float) -> Tensor:
    """Return `KL(softmax(teacher / temperature) || softmax(logits / temperature))` of each row, in fp32 at least.

    Args:
        logits: the student's logits `[*, size]`; with a group, this rank's columns `[*, ceil(size / tp)]`. The gradient
            has their type.
        teacher: the teacher's logits of the same shape, which get no gradient.
        group: the tensor axis; None without one.
        size: the number of columns of the whole logits, without padding.
        temperature: the divisor of both logits.

    Returns:
        The divergences `[*]`, equal on all ranks of the group.
    """
    assert logits.shape == teacher.shape, f"logits {tuple(logits.shape)} and {tuple(teacher.shape)} of the teacher"
    divergences = _VocabParallelDivergence.apply(logits, teacher.detach(), group, size, temperature)  # type: ignore[no-untyped-call]
    return cast(Tensor, divergences)


class _VocabParallelDivergence(torch.autograd.Function):
    """The divergence with a backward pass that recomputes both distributions.

    The forward pass saves the logits of both models and four numbers for each row.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, teacher: Tensor, group: Group, size: int, temperature: float) -> Tensor:
        number = group_size(group)
        start, stop = (0, size) if group is None else bounds_of_part(size, index_in_group(group), number)
        width = stop - start  # without padded columns, which have no probability
        parts = [at_least_fp32(whole[..., :width]) / temperature for whole in (logits, teacher)]
        # The last ranks may have padded columns only.
        lowest = parts[0].new_full(logits.shape[:-1], -torch.inf)
        # Relative to the maximum of its whole row, no exponential overflows.
        maxima = torch.stack([part.amax(-1) if width else lowest for part in parts])
        if number > 1:
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group)
        student, taught = (part - maximum.unsqueeze(-1) for part, maximum in zip(parts, maxima, strict=True))
        # With t and s relative to their maxima and p = exp(t) / sum exp(t), the divergence is sum p (t - s) + log sum
        # exp(s) - log sum exp(t). All three are sums over columns, so ranks add their parts.
        weights = taught.exp()
        sums = torch.stack([student.exp().sum(-1), weights.sum(-1), (weights * (taught - student)).sum(-1)])
        if number > 1:
            dist.all_reduce(sums, group=group)
        log_sums = sums[:2].log()
        ctx.save_for_backward(logits, teacher, maxima, log_sums)
        ctx.width, ctx.temperature = width, temperature
        return sums[2] / sums[1] + log_sums[0] - log_sums[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, teacher, maxima, log_sums = ctx.saved_tensors
        student, taught = (
            (at_least_fp32(whole[..., : ctx.width]) / ctx.temperature - maximum.unsqueeze(-1) - log_sum.unsqueeze(-1))
            for whole, maximum, log_sum in zip((logits, teacher), maxima, log_sums, strict=True)
        )
        slopes = torch.zeros_like(logits)
        # The derivative by a logit is (student's probability - teacher's probability) / temperature.
        slopes[..., : ctx.width] = (student.exp() - taught.exp()) * (grad / ctx.temperature).unsqueeze(-1)
        return slopes, None, None, None, None
