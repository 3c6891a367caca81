"""Blocks of consecutive elements of a whole parameter, which parts of any layout share, and maxima of their elements.

The elements of a block may lie on several ranks, in rows of tensor ranks or shards. A part of a rank is seen as rows of
equal width, each within one block, so that all elements are handled by the same operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod

import torch
from torch import Tensor

from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.parts import Segment, segments_of
from trainer.parallel.placement import ParameterPlacement

BLOCK = 256
"""The elements of a block; the last block of a parameter may have fewer."""


def num_blocks(shape: Sequence[int]) -> int:
    """Return the number of blocks of a parameter of this whole shape."""
    return -(-prod(shape) // BLOCK)


@dataclass(frozen=True)
class BlockRows:
    """This rank's part of a parameter as rows `[rows, width]` of consecutive elements.

    Args:
        width: the elements of a row, a divisor of `BLOCK`.
        blocks: the block of each row, int64 `[rows]`. Rows of padding, which are zero, count to any block.
    """

    width: int
    blocks: Tensor

    def of(self, tensor: Tensor) -> Tensor:
        """Return a view of a contiguous tensor with the shape of the part as rows."""
        return tensor.view(-1, self.width)

    def spread(self, values: Tensor, rows: slice) -> Tensor:
        """Return the values of the blocks, `[blocks]`, for some of the rows: `[rows, 1]`."""
        return values.index_select(0, self.blocks[rows]).unsqueeze(1)

    def raise_(self, maxima: Tensor, values: Tensor, rows: slice) -> None:
        """Raise the maxima of blocks, `[blocks]`, to the values of some of the rows, `[rows, width]`, in place."""
        maxima.scatter_reduce_(0, self.blocks[rows], values.amax(1), "amax")


def block_rows(
    placement: ParameterPlacement, shape: Sequence[int], mesh: ParallelMesh | None, device: torch.device
) -> BlockRows:
    """Return the rows of this rank's part of a parameter, as wide as its blocks and its placement permit.

    Args:
        placement: the placement of the parameter.
        shape: the shape of this rank's part, with padding.
        mesh: the ranks; None: the part is the whole parameter.
        device: the device of the blocks.
    """
    whole = [[Segment(0, size, 0)] for size in placement.shape]
    if mesh is None:
        dims = whole
    else:
        dims = segments_of(placement, mesh, placement.splits)
    # Dimensions after the last split one are whole, and so are its runs of consecutive elements.
    last = max((dim for dim, found in enumerate(dims) if found != whole[dim]), default=0)
    inner = prod(placement.shape[last + 1 :])
    runs = [Segment(run.start * inner, run.length * inner, run.local * inner) for run in dims[last]] if dims else []
    runs = runs or [Segment(0, prod(shape[last:]), 0)]  # a number without dimensions, or an empty part
    local, stride = prod(shape[last:]), prod(placement.shape[last:])
    width = gcd(BLOCK, local, *(value for run in runs for value in (run.start, run.local, run.length)))
    if last:
        width = gcd(width, stride)
    first = torch.zeros(local // width, dtype=torch.int64, device=device)
    for run in runs:
        positions = torch.arange(run.start, run.start + run.length, width, device=device)
        first[run.local // width : (run.local + run.length) // width] = positions
    outer = torch.zeros(1, dtype=torch.int64, device=device)
    for dim in range(last):
        places = torch.zeros(shape[dim], dtype=torch.int64, device=device)
        for run in dims[dim]:
            places[run.local : run.local + run.length] = torch.arange(run.start, run.start + run.length, device=device)
        outer = (outer.unsqueeze(1) * placement.shape[dim] + places).flatten()
    return BlockRows(width, (outer.unsqueeze(1) * stride + first).flatten() // BLOCK)


def share_maxima(
    maxima: Sequence[Tensor], placements: Sequence[ParameterPlacement], mesh: ParallelMesh
) -> list[Tensor]:
    """Return the maxima of blocks over all ranks that hold their elements: one collective for each split axis.

    Args:
        maxima: the maxima of this rank's elements, `[blocks]` for each parameter, in the same order on all ranks.
        placements: the placements of these parameters.
        mesh: the ranks.
    """
    shared = list(maxima)
    for axis in dict.fromkeys(axis for placement in placements for axis in placement.split_axes):
        split = [index for index, placement in enumerate(placements) if axis in placement.split_axes]
        joined = mesh.max_(torch.cat([shared[index] for index in split]), axis)
        parts = torch.split(joined, [shared[index].numel() for index in split])
        for index, part in zip(split, parts, strict=True):
            shared[index] = part
    return shared
