"""Which elements of a whole tensor the part of one rank holds: pure functions, without communication.

A dimension of n elements is cut into parts of `ceil(n / size)`. A fused projection is several blocks laid one after the
other (q, k and v; gate and up), and each block is cut by itself, so that a rank gets its share of every one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.parallel.placement import Split


def bounds_of_part(total: int, index: int, size: int) -> tuple[int, int]:
    """First element, and the one after the last, of part `index` of `size`; an empty part begins and ends at `total`.

    All parts have `ceil(total / size)` elements until there are no more.
    """
    part = -(-total // size)
    return min(index * part, total), min((index + 1) * part, total)


def part_of(whole: Tensor, split: Split, index: int, size: int) -> Tensor:
    """The part of `whole` that rank `index` of `size` along the split's axis holds, in new memory.

    Where a block does not divide by `size`, zeros follow its last elements, so that all parts have the same shape.

    Args:
        whole: `[..., n, ...]`, n the size of dimension `split.dim`.
        split: how it is cut.
        index: of the part.
        size: number of parts.

    Returns:
        `[..., blocks * ceil(n / blocks / size), ...]`.
    """
    dim, block = _dim_and_block(split, whole.shape[split.dim or 0])
    start, stop = bounds_of_part(block, index, size)
    shape = list(whole.shape)
    shape[dim] = -(-block // size) - (stop - start)
    padding = whole.new_zeros(shape)
    pieces = []
    for piece in torch.split(whole, block, dim):
        pieces += [piece.narrow(dim, start, stop - start), padding]
    return torch.cat(pieces, dim)


def ranges_of_part(total: int, split: Split, index: int, size: int) -> tuple[int, list[tuple[int, int]]]:
    """What to read where a part is filled from a file: the ranges of dimension `split.dim` that `part_of` would take.

    Args:
        total: size of that dimension of the whole.
        split: how it is cut.
        index: of the part.
        size: number of parts.

    Returns:
        Elements of the part for each block, and for each block the first element of its range and the one after its
        last; a range that is shorter is followed by zeros.
    """
    _, block = _dim_and_block(split, total)
    start, stop = bounds_of_part(block, index, size)
    return -(-block // size), [(first + start, first + stop) for first in range(0, total, block)]


def join_parts(parts: Sequence[Tensor], split: Split, whole_size: int) -> Tensor:
    """The whole tensor of which `part_of` gave `parts`, its padding dropped, in new memory.

    Args:
        parts: of all ranks along the split's axis, in their order, `[..., n, ...]` each.
        split: how the whole was cut.
        whole_size: of its dimension `split.dim`.

    Returns:
        `[..., whole_size, ...]`.
    """
    dim, block = _dim_and_block(split, whole_size)
    size = len(parts)
    bounds = [bounds_of_part(block, index, size) for index in range(size)]
    cut = [part.chunk(split.blocks, dim) for part in parts]
    return torch.cat(
        [
            cut[index][number].narrow(dim, 0, stop - start)
            for number in range(split.blocks)
            for index, (start, stop) in enumerate(bounds)
        ],
        dim,
    )


def _dim_and_block(split: Split, total: int) -> tuple[int, int]:
    """The dimension that is cut, and the size of each of its blocks."""
    assert split.dim is not None, "a flattened parameter is cut by who flattened it"
    assert total % split.blocks == 0, f"{total} is not {split.blocks} equal blocks"
    return split.dim, total // split.blocks
