"""The division of experts over ranks: each has the same number of whole experts of every layer, and all its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from trainer.base.errors import UsageError
from trainer.features.experts.blocks import overlap_shared
from trainer.features.experts.products import EXPERT_GROUP, EXPERT_PRODUCTS
from trainer.models.configuration import number_of_experts
from trainer.models.names import owner_of, replace_in
from trainer.parallel.groups import group_size, index_in_group
from trainer.parallel.placement import EXPERT_AXIS, REPLICAS_AXIS, ParameterPlacement, Placements, Split
from trainer.parallel.shards.slices import part_of


def divide_experts(model: Any, group: dist.ProcessGroup, placements: Placements) -> Placements:
    """Leave this rank its experts of each layer, and return the placements after the cut; see `ExpertCut`."""
    require_division(model.config, group_size(group))
    split, divided = Split(0, EXPERT_AXIS), {}
    for path, experts in experts_of(model):
        setattr(experts, EXPERT_GROUP, group)
        overlap_shared(model.get_submodule(owner_of(path)), model.config.model_type)
        for name, parameter in [*experts.named_parameters(path)]:  # also those of adapters
            if parameter.shape[0] == experts.num_experts:
                part = part_of(parameter.detach(), split, index_in_group(group), group_size(group))
                replace_in(model, name, nn.Parameter(part, parameter.requires_grad))
                divided[name] = _divided(placements[name], split)
    return placements | divided


def experts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the experts of each layer of a model that are on this rank's stages, by name."""
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "_is_expert_parallel"))


def require_division(config: Any, num_ranks: int) -> None:
    """Refuse a model without experts, or with a number of them that the ranks do not divide.

    Raises:
        UsageError: the model cannot be divided.
    """
    count = number_of_experts(config)
    if not count or config._experts_implementation != EXPERT_PRODUCTS:
        raise UsageError(
            f"`parallel.expert` is {num_ranks}, but the family {config.model_type} has no experts that can be divided;"
            " set it to 1"
        )
    if count % num_ranks:
        *most, last = [str(number) for number in range(1, count + 1) if count % number == 0]
        raise UsageError(
            f"`parallel.expert` must divide the model's {count} experts, but is {num_ranks}; use"
            f" {', '.join(most)} or {last}"
        )


def _divided(placement: ParameterPlacement, split: Split) -> ParameterPlacement:
    # All tokens for an expert come to its rank, so that ranks with other experts have no part of its gradient.
    partial = [REPLICAS_AXIS if axis == "dp" else axis for axis in placement.partial_over]
    return replace(placement, splits=(split, *placement.splits), partial_over=tuple(partial))
