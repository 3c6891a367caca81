"""Stochastic rounding of sharded weights to bf16, the same under every layout.

The 16 random bits of an element are a function of a seed, the step, the name of the parameter, and the position of the
element in the whole parameter. Each rank therefore rounds its part as one process would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.parts import Box, flat_part
from trainer.parallel.placement import TENSOR_AXIS, ParameterPlacement
from trainer.parallel.random import random_lanes, row_keys, stream_key

_LOW_BITS = 0xFFFF  # of fp32, which bf16 does not have


class KeyedRounding:
    """Stochastic rounding of the elements of parameters.

    Args:
        placements: the placement of each parameter.
        mesh: the ranks.
        seed: the seed of the recipe.
    """

    def __init__(self, placements: Mapping[nn.Parameter, ParameterPlacement], mesh: ParallelMesh, seed: int) -> None:
        self._placements = placements
        self._mesh = mesh
        self._seed = seed
        self.step = 0
        """The number of steps before the current one, which keys its bits."""

    def round_(self, parameter: nn.Parameter, start: int, exact: Tensor) -> Tensor:
        """Return elements of this rank's part of a parameter in bf16; `exact` is overwritten.

        Each becomes one of its two neighbours in bf16, at random; the expected value is `exact`.

        Args:
            parameter: the parameter, perhaps a DTensor.
            start: the index of the first element in this rank's flattened part.
            exact: the elements, fp32 `[n]`.
        """
        placement = self._placements[parameter]
        offset = _first_row(parameter) * prod(parameter.shape[1:]) + start
        tensor_splits = tuple(split for split in placement.splits if split.axis == TENSOR_AXIS)
        lanes = torch.zeros(exact.shape, dtype=torch.int16, device=exact.device)
        part = flat_part("", lanes, offset, replace(placement, splits=tensor_splits), self._mesh, ())
        key = stream_key(self._seed, self.step, "stochastic rounding", placement.name)
        for box in part.boxes:
            box.view.copy_(_bits(key, box, placement.shape))
        # The sum carries into the upper half with the probability of the lower one, which is then cut off.
        bits = exact.view(torch.int32)
        bits.add_(lanes.int().bitwise_and_(_LOW_BITS)).bitwise_and_(~_LOW_BITS)
        return exact.bfloat16()


def _first_row(parameter: nn.Parameter) -> int:
    """Return the first row of this rank's shard in the part of a tensor rank."""
    if not isinstance(parameter, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return int(offset[0])


def _bits(key: int, box: Box, shape: tuple[int, ...]) -> Tensor:
    """Return 16 random bits for each element of a box of a tensor of this shape, as int16."""
    device = box.view.device
    rows = torch.zeros((), dtype=torch.int64, device=device)
    for start, size, whole in zip(box.start[:-1], box.shape[:-1], shape[:-1], strict=True):
        rows = rows.unsqueeze(-1) * whole + torch.arange(start, start + size, device=device)
    lanes = random_lanes(row_keys(key, rows.flatten()), box.shape[-1], box.start[-1])
    return lanes.reshape(box.shape)
