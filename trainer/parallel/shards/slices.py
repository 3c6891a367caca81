"""The elements of a whole tensor in the part of one rank: pure functions, without communication.

A dimension of n elements is split into parts of `ceil(n / size)`. Each block of a fused projection (q, k and v; gate
and up) is split by itself, so each rank has a part of every block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.parallel.placement import Split


def bounds_of_part(total: int, index: int, size: int) -> tuple[int, int]:
    """Return start and stop of part `index` of `size`: `ceil(total / size)` elements, fewer or none in the last parts.

    An empty part starts and stops at `total`.
    """
    part = -(-total // size)
    return min(index * part, total), min((index + 1) * part, total)


def part_of(whole: Tensor, split: Split, index: int, size: int) -> Tensor:
    """Return the part of `whole` on rank `index` of `size` along the split's axis, in new memory.

    If `size` does not divide a block, zeros pad its last parts, so all parts have the same shape.

    Args:
        whole: the whole tensor `[..., n, ...]`, n the size of dimension `split.dim`.

    Returns:
        The part `[..., blocks * ceil(n / blocks / size), ...]`.
    """
    dim, block = _dim_and_block(split, whole.shape[split.dim or 0])
    start, stop = bounds_of_part(block, index, size)
    shape = list(whole.shape)
    shape[dim] = -(-block // size) - (stop - start)
    padding = whole.new_zeros(shape)
    pieces = []
    for piece in torch.split(whole, block, dim):
        # Each block has its own padding, so blocks have equal widths on all ranks.
        pieces += [piece.narrow(dim, start, stop - start), padding]
    return torch.cat(pieces, dim)


def ranges_of_part(total: int, split: Split, index: int, size: int) -> tuple[int, list[tuple[int, int]]]:
    """Return the ranges of dimension `split.dim` that `part_of` takes, to read a part from a file.

    Returns:
        The number of elements of the part in each block, and start and stop of its range in each block. In the part,
        zeros follow a shorter range.
    """
    _, block = _dim_and_block(split, total)
    start, stop = bounds_of_part(block, index, size)
    return -(-block // size), [(first + start, first + stop) for first in range(0, total, block)]


def join_parts(parts: Sequence[Tensor], split: Split, whole_size: int) -> Tensor:
    """Return the whole tensor from the results of `part_of`, without padding, in new memory.

    Args:
        parts: the parts of all ranks along the split's axis, in order, `[..., n, ...]` each.
        whole_size: the size of its dimension `split.dim`.

    Returns:
        The whole tensor `[..., whole_size, ...]`.
    """
    dim, block = _dim_and_block(split, whole_size)
    size = len(parts)
    bounds = [bounds_of_part(block, index, size) for index in range(size)]
    # By rank, then by block; the whole tensor has each block of all ranks, one after the other.
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
    assert split.dim is not None, "a flattened parameter is cut by who flattened it"
    assert total % split.blocks == 0, f"{total} is not {split.blocks} equal blocks"
    return split.dim, total // split.blocks
