"""Losses of rows of logits, and their gradients in the place of the logits, without a copy of all logits in fp32.

For each row with logits z and label y, over the other columns v: m = max z_v and s = sum exp(z_v - m). With
d = log s + m - z_y and q = sigmoid(d) = 1 - p_y, the loss is log(1 + exp d). The gradient of z_y is -q, and that of z_v
is exp(z_v - m) q / s. z_y is not in the sum, because a row with p_y near 1 would lose the digits of 1 - p_y.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import increment_version

from trainer.parallel.dtypes import at_least_fp32, computes_on_cpu
from trainer.parallel.groups import group_size, index_in_group
from trainer.parallel.kernel_support import KERNELS, missing
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.parallel.shards.slices import bounds_of_part
from trainer.parallel.tensor.cross_entropy import VocabularyCut, target_columns

KERNEL = "vocabulary"
_ELEMENTS_ON_CPU = 2**18  # 1 MiB in fp32, which stays in the cache of a core
_ELEMENTS = 2**24


def losses_of(logits: Tensor, labels: Tensor, cut: VocabularyCut) -> tuple[Tensor, Tensor]:
    """Return losses of rows `[rows]`, 0 for ignored labels, and the statistics of all ranks for `write_gradients_`.

    Args:
        logits: this rank's columns `[rows, ceil(vocabulary / ranks)]`.
        labels: int64 `[rows]`, equal on all ranks.
    """
    kernel, numbers = _kernel(logits), _numbers(cut)
    found = kernel.statistics(logits, labels, *numbers) if kernel else _statistics(logits, labels, *numbers)
    return _finished(found, labels, cut)


def write_gradients_(
    logits: Tensor, labels: Tensor, statistics: Tensor, gradients: Tensor | None, cut: VocabularyCut
) -> None:
    """Replace logits by the gradients of their losses, times `gradients` of the losses `[rows]`, if given."""
    kernel, numbers = _kernel(logits), _numbers(cut)
    if kernel:
        kernel.write_gradients(logits, labels, statistics, gradients, *numbers)
        increment_version(logits)  # which a launch leaves: autograd then refuses a second backward pass
    else:
        _write_gradients_(logits, labels, statistics, gradients, *numbers)


def losses_and_gradients_(logits: Tensor, labels: Tensor, cut: VocabularyCut) -> Tensor:
    """Return the losses of rows, and replace logits by the gradients of these losses."""
    kernel = _kernel(logits)
    if kernel and group_size(cut.group) == 1:
        found = kernel.statistics_and_gradients(logits, labels, *_numbers(cut))
        return _finished(found, labels, cut)[0]
    losses, statistics = losses_of(logits, labels, cut)
    write_gradients_(logits, labels, statistics, None, cut)
    return losses


def _kernel(logits: Tensor) -> Any:
    if missing(KERNEL, logits.device) is not None or not KERNELS[KERNEL].takes(logits):
        return None
    return KERNELS[KERNEL]


def _numbers(cut: VocabularyCut) -> tuple[int, int, int]:
    """Return the number of this rank's columns without padding, the token of the first, and the number of tokens."""
    start, stop = bounds_of_part(cut.size, index_in_group(cut.group), group_size(cut.group))
    return stop - start, start, cut.size


def _finished(found: Tensor, labels: Tensor, cut: VocabularyCut) -> tuple[Tensor, Tensor]:
    """Return the losses and the statistics of all ranks for the statistics of this rank's columns."""
    if group_size(cut.group) > 1:
        maximum = found[0].clone()
        dist.all_reduce(maximum, dist.ReduceOp.MAX, cut.group)
        # Sums become relative to the maximum of all ranks; a rank without the label has 0 for its logit.
        shared = torch.stack([found[1] * (found[0] - maximum).exp_(), found[2]])
        dist.all_reduce(shared, group=cut.group)
        found = torch.stack([maximum, *shared.unbind()])
    losses = F.softplus(_distance(found)).masked_fill_(labels == IGNORED_LABEL, 0.0)
    return losses, found


def _distance(statistics: Tensor) -> Tensor:
    maximum, sums, at_label = statistics.unbind()
    # With a large maximum, its sum with the logarithm would lose digits.
    return (maximum - at_label) + sums.log()


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Yield blocks of rows that are small enough for a copy in fp32."""
    step = max(1, (_ELEMENTS_ON_CPU if computes_on_cpu(logits) else _ELEMENTS) // logits.shape[1])
    return (slice(first, first + step) for first in range(0, len(logits), step))


def _statistics(logits: Tensor, labels: Tensor, num_columns: int, start: int, vocabulary: int) -> Tensor:
    """Return the maximum, the sum and the logit of the label for each row `[3, rows]`, in fp32 at least.

    The maximum may be that of the label, which changes no result. A label of another rank has the logit 0.
    """
    ignored = labels == IGNORED_LABEL
    target, elsewhere = target_columns(labels, ignored, start, logits.shape[1], vocabulary)
    target, has_label = target.unsqueeze(1), ~elsewhere.unsqueeze(1)
    parts = []
    for rows in _blocks(logits):
        values = at_least_fp32(logits[rows, :num_columns])
        if not num_columns:  # a rank with padded columns only
            lowest = values.new_full((len(values),), torch.finfo(values.dtype).min)
            parts.append(torch.stack([lowest, lowest * 0.0, lowest * 0.0]))
            continue
        at_label = values.gather(1, target[rows])
        maximum = values.amax(1, keepdim=True)
        exponentials = (values - maximum).exp_()
        own = exponentials.gather(1, target[rows])
        exponentials.scatter_(1, target[rows], own.masked_fill_(has_label[rows], 0.0))
        at_label = at_label.masked_fill_(~has_label[rows], 0.0)
        parts.append(torch.stack([maximum.squeeze(1), exponentials.sum(1), at_label.squeeze(1)]))
    return torch.cat(parts, 1)


def _write_gradients_(
    logits: Tensor, labels: Tensor, statistics: Tensor, gradients: Tensor | None, num_columns: int, start: int,
    vocabulary: int,
) -> None:  # fmt: skip
    ignored = labels == IGNORED_LABEL
    target, elsewhere = target_columns(labels, ignored, start, logits.shape[1], vocabulary)
    maximum, sums, _ = statistics.unbind()
    wrong = torch.sigmoid(_distance(statistics))
    if gradients is not None:
        wrong = wrong * gradients
    wrong = wrong.masked_fill_(ignored, 0.0)
    share = torch.where(sums == 0, 0.0, wrong / sums).unsqueeze(1)  # a vocabulary of one token has no other column
    maximum, target, at_label = maximum.unsqueeze(1), target.unsqueeze(1), -wrong.unsqueeze(1)
    is_elsewhere = elsewhere.unsqueeze(1)
    for rows in _blocks(logits):
        values = logits[rows, :num_columns]
        if num_columns:
            own = values if values.dtype == statistics.dtype else values.to(statistics.dtype)
            own.sub_(maximum[rows]).exp_().mul_(share[rows])
            own.scatter_(1, target[rows], torch.where(is_elsewhere[rows], own.gather(1, target[rows]), at_label[rows]))
            if own is not values:
                values.copy_(own)
        if num_columns < logits.shape[1]:  # padding
            logits[rows, num_columns:] = 0.0
