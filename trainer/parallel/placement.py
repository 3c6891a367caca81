"""The placement of each parameter over the mesh, and the axes over which its gradient is partial.

Gradient sync, the global norm, loading, checkpoints and the start summary derive from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

TENSOR_AXIS = "tp"
"""The mesh axis of tensor parallelism."""

CONTEXT_AXIS = "cp"
"""The mesh axis of context parallelism."""

EXPERT_AXIS = "ep"
"""The mesh axis of the data ranks that divide the experts of a layer."""

REPLICAS_AXIS = "dp_replicate_shard"
"""The data ranks with the same experts, over which the gradients of these are summed."""

SHARDS_AXIS = "dp_shard_ep"
"""The data ranks over which FSDP shards all parameters but experts, which it shards over `dp_shard`."""

SHARD_AXES = ("dp_shard", SHARDS_AXIS)
"""The axes over which a strategy shards parameters."""

ROWS_AXIS = "cp_tp"
"""The context and tensor axes together: the ranks that process the same rows. They shard the vocabulary."""

PIPELINE_AXIS = "pp"
"""The mesh axis of pipeline stages."""


@dataclass(frozen=True)
class Split:
    """A split of dimension `dim` over the mesh axis `axis`, into parts of equal size up to rounding.

    With `dim` None the flattened parameter is split, as in DeepSpeed. The dimension holds `blocks` blocks of equal size
    (such as q, k and v); each is split over the axis, see `slices.part_of`.
    """

    dim: int | None
    axis: str
    blocks: int = 1


@dataclass(frozen=True)
class ParameterPlacement:
    """The placement of one parameter, by its name in the unsharded model.

    `shape` is that of the whole parameter; without `splits` it is replicated. The gradient must be summed over the axes
    `partial_over`: the data axes for all parameters, since ranks have different rows.

    `stages` are the pipeline stages with a copy, if there are several; each has a part of the gradient. `is_copy` is
    true on all but the first, so the parameter is counted and saved once.
    """

    name: str
    shape: tuple[int, ...]
    splits: tuple[Split, ...] = ()
    partial_over: tuple[str, ...] = ("dp",)
    trainable: bool = True
    stages: tuple[int, ...] = ()
    is_copy: bool = False

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The axes with different parts on their ranks; a norm must sum over them."""
        return tuple(split.axis for split in self.splits)

    def num_elements(self, sizes: Mapping[str, int]) -> int:
        """Return the number of elements on the first rank, which has the most, given the size of each axis."""
        shape = list(self.shape)
        for split in self.splits:
            if split.dim is None:
                shape = [prod(shape)]
            dim = split.dim or 0
            # Each block is cut by itself, and the first rank has the largest part of each.
            shape[dim] = split.blocks * ceil(shape[dim] // split.blocks / sizes[split.axis])
        return prod(shape)


Placements = dict[str, ParameterPlacement]


def whole(model: nn.Module) -> Placements:
    """Return replicated placements of all parameters of `model`; a tied parameter has its first name only."""
    return {
        name: ParameterPlacement(name, tuple(parameter.shape), trainable=parameter.requires_grad)
        for name, parameter in model.named_parameters()
    }
