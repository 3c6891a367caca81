"""Stochastic rounding of sharded weights to bf16, the same under every layout.

The 16 random bits of an element are a function of a seed, the step, the name of the parameter, and the position of the
element in the whole parameter. Each rank therefore rounds its part as one process would.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer.parallel.copying import to_device
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.placement import ParameterPlacement
from trainer.parallel.random import random_lanes, row_keys, stream_keys
from trainer.parallel.shards.boxes import flat_part, positions_of
from trainer.parallel.shards.gathering import tensor_splits

_LOW_BITS = 0xFFFF  # of fp32, which bf16 does not have


class Piece(NamedTuple):
    """Elements `start` to `stop` of this rank's flattened part of a parameter."""

    parameter: nn.Parameter
    start: int
    stop: int


class KeyedRounding:
    """Stochastic rounding of the elements of parameters."""

    def __init__(self, placements: Mapping[nn.Parameter, ParameterPlacement], mesh: ParallelMesh, seed: int) -> None:
        self._placements = placements
        self._mesh = mesh
        self._seed = seed

    def round_(self, pieces: Sequence[Piece], exact: Tensor, step: int) -> Tensor:
        """Return elements of this rank's parts of parameters in bf16; `exact` is overwritten.

        Each becomes one of its two neighbours in bf16, at random; the expected value is `exact`.

        Args:
            pieces: the elements of each parameter, perhaps a DTensor.
            exact: the elements of all pieces, fp32 `[n]`.
            step: the number of steps before the current one, which keys its bits.
        """
        lanes = torch.zeros(exact.shape, dtype=torch.int16, device=exact.device)
        sizes = [piece.stop - piece.start for piece in pieces]
        views: defaultdict[_Region, list[tuple[str, Tensor]]] = defaultdict(list)
        for piece, flat in zip(pieces, torch.split(lanes, sizes), strict=True):
            placement = self._placements[piece.parameter]
            # FSDP cuts the first dimension, so a shard is a run of elements of the flattened part.
            offset = _first_row(piece.parameter) * prod(piece.parameter.shape[1:]) + piece.start
            splits = tuple(tensor_splits(placement, self._mesh))
            part = flat_part("", flat, offset, replace(placement, splits=splits), self._mesh, ())
            for box in part.boxes:
                views[_Region(box.start, box.shape, placement.shape)].append((placement.name, box.view))
        # Parameters with equal boxes draw their bits together, in few operations.
        for region, named in views.items():
            names, boxes = zip(*named, strict=True)
            keys = stream_keys((self._seed, step, "stochastic rounding"), ((name,) for name in names))
            bits = _bits(to_device(torch.tensor(keys), exact.device), region)
            torch._foreach_copy_(list(boxes), list(bits))
        # The sum carries into the upper half with the probability of the lower one, which is then cut off.
        bits = exact.view(torch.int32)
        bits.add_(lanes.int().bitwise_and_(_LOW_BITS)).bitwise_and_(~_LOW_BITS)
        return exact.bfloat16()


class _Region(NamedTuple):
    """A box of a parameter: its first element along each dimension, its shape, and that of the whole parameter."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]


def _first_row(parameter: nn.Parameter) -> int:
    """Return the first row of this rank's shard in the part of a tensor rank."""
    if not isinstance(parameter, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return int(offset[0])


def _bits(keys: Tensor, region: _Region) -> Tensor:
    """Return 16 random bits for each element of a box of several parameters, as int16 `[parameters, *box]`.

    Args:
        keys: the keys of the parameters, int64 `[parameters]`.
        region: the box, which is the same one of each.
    """
    rows = positions_of(region.start[:-1], region.shape[:-1], region.whole[:-1], keys.device)
    lanes = random_lanes(row_keys(keys.unsqueeze(-1), rows), region.shape[-1], region.start[-1])
    return lanes.reshape(-1, *region.shape)
