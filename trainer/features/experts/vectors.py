"""Vectors of attention that tensor ranks divide by heads: sinks, and norms over the features of all heads."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from trainer.models.forward_context import replace_forward
from trainer.parallel.communication import copy_to_group, reduce_from_group
from trainer.parallel.groups import Group, group_size, index_in_group
from trainer.parallel.placement import TENSOR_AXIS, ParameterPlacement, Placements, Split
from trainer.parallel.shards.slices import part_of

_GROUP = "ranks_of_heads"


def cut_vector(name: str, module: nn.Module, prefix: str, group: Group) -> Placements:
    """Leave a module its part of the vector `name`, and return its placement; see `TensorPlan.parts`."""
    whole, split = module.get_parameter(name), Split(0, TENSOR_AXIS)
    part = part_of(whole.detach(), split, index_in_group(group), group_size(group))
    setattr(module, name, nn.Parameter(part, whole.requires_grad))
    placed = f"{prefix}{name}"
    return {placed: ParameterPlacement(placed, tuple(whole.shape), (split,), trainable=whole.requires_grad)}


def cut_norm(module: nn.Module, prefix: str, group: Group) -> Placements:
    """Leave an RMS norm over the features of all heads those of this rank, and return its placement."""
    setattr(module, _GROUP, group)
    replace_forward(module, _normed)
    return cut_vector("weight", module, prefix, group)


def _normed(self: Any, hidden: Tensor) -> Tensor:
    """Return this rank's features, divided by the root mean square of those of all ranks, as in transformers."""
    group, wide = getattr(self, _GROUP), hidden.to(torch.float32)
    squares = wide.pow(2).sum(-1, keepdim=True)
    # Each rank uses the sum for its own features, so the gradients of all ranks are summed, too.
    squares = copy_to_group(reduce_from_group(squares, group), group)
    mean = squares / (wide.shape[-1] * group_size(group))
    return cast(Tensor, self.weight * (wide * torch.rsqrt(mean + self.variance_epsilon)).to(hidden.dtype))
