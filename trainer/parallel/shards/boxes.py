"""The blocks of a whole tensor that a rank holds: parts of tensor ranks, shards of FSDP, partitions of DeepSpeed.

A checkpoint names elements by their position in the unsharded tensor, so it can be saved and loaded under any layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch import Tensor

from trainer.parallel.mesh import AXES, JOINT_AXES, ParallelMesh
from trainer.parallel.placement import PIPELINE_AXIS, SHARD_AXES, ParameterPlacement, Split
from trainer.parallel.shards.gathering import local_part
from trainer.parallel.shards.slices import bounds_of_part, ranges_of_part

_REPLICATING_AXES = [axis for axis in AXES if axis != PIPELINE_AXIS]  # its ranks hold other parameters


@dataclass(frozen=True)
class Box:
    """A block of a whole tensor: its first element along each dimension, and this rank's memory.

    `view` is the memory of the training, not a copy: a snapshot copies from it, loading copies into it.
    """

    start: tuple[int, ...]
    view: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.view.shape)


@dataclass(frozen=True)
class TensorPart:
    """This rank's boxes of one tensor; it is number `replica` of the `num_replicas` ranks with the same boxes.

    `shape` is that of the whole tensor; ranks along `replicated_over` are replicas. Boxes of other ranks are disjoint,
    and all boxes together are the whole tensor.
    """

    name: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    replicated_over: tuple[str, ...] = ()
    replica: int = 0
    num_replicas: int = 1


@dataclass(frozen=True)
class Segment:
    """Elements `start` to `start + length` of a dimension of the whole; they begin at `local` in this rank's tensor."""

    start: int
    length: int
    local: int


def positions_of(start: Sequence[int], shape: Sequence[int], whole: Sequence[int], device: torch.device) -> Tensor:
    """Return the position of each element of a block in the flattened whole tensor, int64 `[elements]`."""
    positions = torch.zeros((), dtype=torch.int64, device=device)
    for first, size, total in zip(start, shape, whole, strict=True):
        # In row-major order, each dimension multiplies the positions so far.
        positions = positions.unsqueeze(-1) * total + torch.arange(first, first + size, device=device)
    return positions.flatten()


def tensor_part(name: str, tensor: Tensor, placement: ParameterPlacement, mesh: ParallelMesh) -> TensorPart:
    """Return this rank's part of a parameter or of a tensor of its optimizer state.

    A tensor with another number of dimensions than `placement.shape` is replicated.
    """
    if tensor.dim() != len(placement.shape):
        return whole_part(name, tensor, mesh)
    local = local_part(tensor)
    dims = segments_of(placement, mesh, placement.splits)
    boxes = _boxes(dims, (0,) * local.dim(), tuple(local.shape), local)
    return TensorPart(name, placement.shape, tuple(boxes), *_replicas(placement.split_axes, mesh))


def whole_part(name: str, tensor: Tensor, mesh: ParallelMesh) -> TensorPart:
    """Return the part of a tensor that is replicated over the ranks of a pipeline stage."""
    shape = tuple(tensor.shape)
    return TensorPart(name, shape, (Box((0,) * len(shape), tensor),), *_replicas((), mesh))


def flat_part(
    name: str, flat: Tensor, start: int, placement: ParameterPlacement, mesh: ParallelMesh, axes: Sequence[str]
) -> TensorPart:
    """Return this rank's part of a flattened tensor, a range of its elements as in DeepSpeed's partitions.

    Args:
        flat: this rank's elements, `[n]`; n may be 0.
        start: the index of the first one in the flattened tensor of this tensor rank.
        axes: the mesh axes over which the flattened tensor is sharded.
    """
    tensor_splits = [split for split in placement.splits if split.dim is not None]
    dims = segments_of(placement, mesh, tensor_splits)
    # The part of this tensor rank, with its padding: the flattened elements are counted in this shape.
    shape = [_extent(placement.shape[dim], dim, tensor_splits, mesh) for dim in range(len(placement.shape))]
    boxes: list[Box] = []
    taken = 0
    for corner, extent in _blocks_of_range(shape, start, start + flat.numel()):
        view = flat[taken : taken + prod(extent)].view(extent)
        taken += prod(extent)
        boxes += _boxes(dims, corner, extent, view)
    split_axes = {*axes, *(split.axis for split in tensor_splits)}
    return TensorPart(name, placement.shape, tuple(boxes), *_replicas(tuple(split_axes), mesh))


def _replicas(split_axes: Sequence[str], mesh: ParallelMesh) -> tuple[tuple[str, ...], int, int]:
    """Return the axes along which ranks are replicas, the index of this rank among them, and their number."""
    split = {part for axis in split_axes for part in JOINT_AXES.get(axis, (axis,))}
    axes = tuple(axis for axis in _REPLICATING_AXES if axis not in split)
    index, number = 0, 1
    for axis in axes:
        # In mixed radix, so the numbers of replicas are distinct and begin at 0.
        index = index * mesh.size(axis) + mesh.index(axis)
        number *= mesh.size(axis)
    return axes, index, number


def _extent(total: int, dim: int, splits: Sequence[Split], mesh: ParallelMesh) -> int:
    for split in splits:
        if split.dim == dim:
            width, _ = ranges_of_part(total, split, mesh.index(split.axis), mesh.size(split.axis))
            total = split.blocks * width
    return total


def segments_of(placement: ParameterPlacement, mesh: ParallelMesh, splits: Sequence[Split]) -> list[list[Segment]]:
    """Return, for each dimension, the segments of its elements in this rank's tensor, without padding."""
    dims = [[Segment(0, size, 0)] for size in placement.shape]
    extents = list(placement.shape)
    for split in splits:
        assert split.dim is not None, "a flattened parameter is cut by who flattened it"
        # A later split cuts the tensor that the earlier ones have left.
        index, size, dim = mesh.index(split.axis), mesh.size(split.axis), split.dim
        width, ranges = ranges_of_part(extents[dim], split, index, size)
        dims[dim] = [
            piece
            for block, (start, stop) in enumerate(ranges)
            for piece in _within(dims[dim], start, stop, block * width)
        ]
        # Shards of torch have no padding: the last ranks have fewer elements.
        is_padded = split.axis not in SHARD_AXES
        extents[dim] = split.blocks * width if is_padded else ranges[0][1] - ranges[0][0]
    return dims


def _within(segments: Sequence[Segment], start: int, stop: int, local: int) -> Iterator[Segment]:
    """Yield the parts of `segments` from `start` to `stop` of the local tensor, relative to an offset of `local`."""
    for segment in segments:
        first, last = max(start, segment.local), min(stop, segment.local + segment.length)
        if first < last:
            yield Segment(segment.start + first - segment.local, last - first, local + first - start)


def _boxes(
    dims: Sequence[Sequence[Segment]], corner: Sequence[int], extent: Sequence[int], view: Tensor
) -> Iterator[Box]:
    """Yield the boxes of the whole tensor that make up a block of the local one; `view` is its memory."""
    clipped = [
        list(_within(segments, first, first + size, 0))
        for segments, first, size in zip(dims, corner, extent, strict=True)
    ]
    # A dimension may have several segments, such as those of q, k and v; each combination is one box.
    for segments in product(*clipped):
        piece = view
        for dim, segment in enumerate(segments):
            if segment.length < piece.shape[dim]:
                piece = piece.narrow(dim, segment.local, segment.length)
        if piece.numel():
            yield Box(tuple(segment.start for segment in segments), piece)


def _blocks_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield corner and extent of the blocks that cover elements `start` to `stop` of a tensor, in memory order.

    There are at most two blocks for each dimension, and one more.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    first, last = start // row, stop // row  # the rows that contain `start` and `stop`
    # First the rest of a row that begins before the range, then whole rows, then the part of a last one.
    if start % row:
        end = min(stop, (first + 1) * row)
        for corner, extent in _blocks_of_range(shape[1:], start - first * row, end - first * row):
            yield (first, *corner), (1, *extent)
        start, first = end, first + 1
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
        start = last * row
    if start < stop:
        for corner, extent in _blocks_of_range(shape[1:], 0, stop - start):
            yield (last, *corner), (1, *extent)


def own_share(parts: Iterable[TensorPart], small_bytes: int = 1 << 16) -> Iterator[tuple[TensorPart, Box]]:
    """Yield the boxes that this rank writes, so that all ranks together write each element once.

    Replicas divide a large box along its first dimension, and take turns with small ones.
    """
    turns: dict[tuple[str, ...], int] = {}  # replicas along the same axes have the same boxes, in the same order
    for part in parts:
        for box in part.boxes:
            # With fewer rows than replicas, a box counts as small.
            if box.view.nbytes > small_bytes and box.shape and box.shape[0] >= part.num_replicas:
                first, last = bounds_of_part(box.shape[0], part.replica, part.num_replicas)
                if first < last:
                    start = (box.start[0] + first, *box.start[1:])
                    yield part, Box(start, box.view[first:last])
                continue
            turn = turns.get(part.replicated_over, 0)
            turns[part.replicated_over] = turn + 1
            if turn % part.num_replicas == part.replica:
                yield part, box
