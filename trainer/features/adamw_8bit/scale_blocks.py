"""Blocks of consecutive elements of a whole parameter, which parts of any layout share, and maxima of their elements.

The elements of a block may lie on several ranks, in rows of tensor ranks or shards. A part of a rank is seen as rows of
equal width, each within one block, so that all elements are handled by the same operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.placement import ParameterPlacement
from trainer.parallel.shards.boxes import Segment, segments_of

BLOCK = 256
"""The elements of a block; the last block of a parameter may have fewer."""


def num_blocks(shape: Sequence[int]) -> int:
    return -(-prod(shape) // BLOCK)


class Rows(NamedTuple):
    """Some rows `[rows, width]` of consecutive elements of a part, each within one block."""

    elements: slice  # the elements in the flattened part
    width: int
    blocks: slice | Tensor  # the block of each row, int32 `[rows]`; or as a slice, where each row is a block of its own

    def of(self, tensor: Tensor) -> Tensor:
        """Return a view of these rows of a contiguous tensor with the shape of the part, `[rows, width]`."""
        return tensor.view(-1)[self.elements].view(-1, self.width)

    def spread(self, values: Tensor) -> Tensor:
        """Return the values of the blocks, `[blocks]`, for each row: `[rows, 1]`."""
        return values[self.blocks].unsqueeze(1)

    def raise_(self, maxima: Tensor, values: Tensor) -> None:
        """Raise the maxima of blocks, `[blocks]`, to the values of rows, `[rows]`, in place."""
        if isinstance(self.blocks, Tensor):
            maxima.scatter_reduce_(0, self.blocks.long(), values, "amax")
        else:
            maxima[self.blocks] = values


@dataclass(frozen=True)
class BlockRows:
    """This rank's part of a parameter as rows of consecutive elements, each within one block."""

    size: int
    width: int  # the elements of a row, a divisor of `BLOCK`
    # The block of each row, int32 `[rows]`. Rows of padding, which are zero, count to any block. None: the part is the
    # whole parameter. Its rows are its blocks; the last one may have fewer elements.
    blocks: Tensor | None

    def pieces(self, most: int) -> Iterator[Rows]:
        """Yield all rows in pieces of at most `most` elements, a multiple of `BLOCK`."""
        whole = self.size - self.size % self.width
        for start in range(0, whole, most):
            yield self._rows(start, min(start + most, whole), self.width)
        if whole < self.size:
            yield self._rows(whole, self.size, self.size - whole)

    def _rows(self, start: int, stop: int, width: int) -> Rows:
        rows = slice(start // self.width, -(-stop // self.width))
        return Rows(slice(start, stop), width, rows if self.blocks is None else self.blocks[rows])


def is_shared(placement: ParameterPlacement, mesh: ParallelMesh | None) -> bool:
    """Return whether ranks have parts of a parameter, and thus share its blocks."""
    return mesh is not None and any(mesh.size(axis) > 1 for axis in placement.split_axes)


def block_rows(
    placement: ParameterPlacement, shape: Sequence[int], mesh: ParallelMesh | None, device: torch.device
) -> BlockRows:
    """Return the rows of this rank's part of a parameter, as wide as its blocks and its placement permit.

    Args:
        shape: the shape of this rank's part, with padding.
        mesh: the ranks; None: the part is the whole parameter.
    """
    if mesh is None or not is_shared(placement, mesh):
        return BlockRows(prod(shape), BLOCK, None)
    whole = [[Segment(0, size, 0)] for size in placement.shape]
    dims = segments_of(placement, mesh, placement.splits)
    # Dimensions after the last split one are whole, and so are its runs of consecutive elements.
    last = max((dim for dim, found in enumerate(dims) if found != whole[dim]), default=0)
    inner = prod(placement.shape[last + 1 :])
    runs = [Segment(run.start * inner, run.length * inner, run.local * inner) for run in dims[last]] if dims else []
    runs = runs or [Segment(0, prod(shape[last:]), 0)]  # a number without dimensions, or an empty part
    local, stride = prod(shape[last:]), prod(placement.shape[last:])
    # The widest rows that cross neither a block nor the end of a run, nor the padding behind it.
    width = gcd(BLOCK, local, *(value for run in runs for value in (run.start, run.local, run.length)))
    if last:
        width = gcd(width, stride)
    # The position of the first element of each row, within the dimensions from `last` on; 0 for padding.
    first = torch.zeros(local // width, dtype=torch.int64, device=device)
    for run in runs:
        positions = torch.arange(run.start, run.start + run.length, width, device=device)
        first[run.local // width : (run.local + run.length) // width] = positions
    # The index of each slice of these, over the dimensions before `last`.
    outer = torch.zeros(1, dtype=torch.int64, device=device)
    for dim in range(last):
        places = torch.zeros(shape[dim], dtype=torch.int64, device=device)
        for run in dims[dim]:
            places[run.local : run.local + run.length] = torch.arange(run.start, run.start + run.length, device=device)
        outer = (outer.unsqueeze(1) * placement.shape[dim] + places).flatten()
    return BlockRows(prod(shape), width, ((outer.unsqueeze(1) * stride + first).flatten() // BLOCK).int())


def share_maxima(
    maxima: Sequence[Tensor], placements: Sequence[ParameterPlacement], mesh: ParallelMesh
) -> list[Tensor]:
    """Return the maxima of blocks over all ranks that hold their elements: one collective for each split axis.

    Args:
        maxima: the maxima of this rank's elements, `[blocks]` for each parameter, in the same order on all ranks.
    """
    shared = list(maxima)
    for axis in dict.fromkeys(axis for placement in placements for axis in placement.split_axes):
        split = [index for index, placement in enumerate(placements) if axis in placement.split_axes]
        joined = mesh.max_(torch.cat([shared[index] for index in split]), axis)
        parts = torch.split(joined, [shared[index].numel() for index in split])
        for index, part in zip(split, parts, strict=True):
            shared[index] = part
    return shared
