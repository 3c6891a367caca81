"""How each parameter lies over the mesh and what its gradient means: said once, where it is created or sharded.

Gradient sync, the global norm, loading, checkpoints and the start-up summary derive from this table; nothing else may
guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod

from torch import nn

TENSOR_AXIS = "tp"
"""The mesh axis over which layers are cut."""

PIPELINE_AXIS = "pp"
"""The mesh axis over which the layers are spread."""


@dataclass(frozen=True)
class Split:
    """The parameter's dimension `dim` is cut over the mesh axis `axis`, into parts of equal size up to rounding.

    `dim` None cuts the flattened parameter, as DeepSpeed does. The dimension is `blocks` blocks of equal size, laid one
    after the other, each of which is cut over the axis (q, k and v in one projection): see `slicing.part_of`.
    """

    dim: int | None
    axis: str
    blocks: int = 1


@dataclass(frozen=True)
class ParameterPlacement:
    """One parameter, by the name that the unsharded model gives it.

    `shape` is that of the whole parameter. Without `splits` every rank holds it whole. `partial_over` names the axes
    over which each rank's gradient is only a part, to be summed: the data axes for all, since ranks see different rows.

    Of a pipeline, `stages` are those that hold it where several do: each has a part of its gradient too. `is_copy` is
    set on all of them but the first, so that it is counted and written once; its own name there may be another one.
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
        """Axes whose ranks hold different parts, so that a norm must sum over them."""
        return tuple(split.axis for split in self.splits)

    def num_elements(self, sizes: Mapping[str, int]) -> int:
        """Elements that the first rank holds, which holds the most, given the size of each axis."""
        shape = list(self.shape)
        for split in self.splits:
            if split.dim is None:
                shape = [prod(shape)]
            dim = split.dim or 0
            shape[dim] = split.blocks * ceil(shape[dim] // split.blocks / sizes[split.axis])
        return prod(shape)


Placements = dict[str, ParameterPlacement]


def whole(model: nn.Module) -> Placements:
    """Every parameter of `model` whole on every rank. A tied parameter stands once, under its first name."""
    return {
        name: ParameterPlacement(name, tuple(parameter.shape), trainable=parameter.requires_grad)
        for name, parameter in model.named_parameters()
    }
