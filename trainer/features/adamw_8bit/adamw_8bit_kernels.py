"""Triton kernels of AdamW with moments in 8 bits.

`fused.py` launches the kernels, and describes the arguments. A program has a tile of `ROWS` rows of `WIDTH`
elements, each within one block. Every operation rounds as IEEE 754 and none is fused with another, so the results are
those of torch's operations in `optimizer.py`.
"""

import triton
import triton.language as tl

from trainer.features.adamw_8bit.dynamic_map import INDEX_BITS, LOW_BITS

_INDEX_MASK, _LOW_BITS = tl.constexpr((1 << INDEX_BITS) - 1), tl.constexpr(LOW_BITS)
_TINY, _LARGEST = tl.constexpr(2.0**-126), tl.constexpr(3.4028234663852886e38)  # of fp32


@triton.jit
def _tile(blocks, num_elements, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Return the blocks of the rows and whether they exist, `[ROWS]`; and likewise elements, `[ROWS, WIDTH]`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_exists = row * WIDTH < num_elements
    if blocks is None:
        block = row
    else:
        block = tl.load(blocks + row, mask=row_exists, other=0).to(tl.int64)
    element = row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return block, row_exists, element, element < num_elements


@triton.jit
def _stored(codes, values, scales, share, tile):
    """Return the share of stored moments in the new ones, fp32 `[ROWS, WIDTH]`."""
    block, row_exists, element, exists = tile
    scale = tl.load(scales + block, mask=row_exists, other=0.0) * share
    code = tl.load(codes + element, mask=exists, other=0).to(tl.uint8, bitcast=True)
    return tl.load(values + code.to(tl.int32)) * scale[:, None]


@triton.jit
def _moments(gradient, first, second, scales, values, num_blocks, shares, tile):
    """Return the new moments of a tile, fp32 `[ROWS, WIDTH]`."""
    gradient = tl.load(gradient + tile[2], mask=tile[3], other=0.0).to(tl.float32)
    new_first = _stored(first, values[0], scales, shares[0], tile) + gradient * shares[1]
    new_second = _stored(second, values[1], scales + num_blocks, shares[2], tile) + gradient * gradient * shares[3]
    return new_first, tl.where(new_second > _LARGEST, _LARGEST, new_second)


@triton.jit
def _maxima(first, second, exists):
    """Return the largest moments of each row, fp32 `[ROWS]`."""
    return tl.max(tl.where(exists, tl.abs(first), 0.0), axis=1), tl.max(tl.where(exists, second, 0.0), axis=1)


@triton.jit
def _store(codes, moment, scale, table, element, exists):
    """Store the codes of a moment, given the scales of its rows."""
    # Rounded to the nearest, as torch divides; Triton's own quotient may differ in the last bit, and so its code.
    number = tl.div_rn(moment, tl.maximum(scale, _TINY)[:, None])
    index = (number.to(tl.int32, bitcast=True) >> _LOW_BITS) & _INDEX_MASK
    tl.store(codes + element, tl.load(table + index), mask=exists)


@triton.jit
def maxima_kernel(
    maxima, gradient, first, second, scales, values, blocks, num_elements, num_blocks, shares,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Raise the maxima of blocks, int32 with the bits of numbers that are not negative, which have the same order."""
    tile = _tile(blocks, num_elements, WIDTH, ROWS)
    block, row_exists = tile[0], tile[1]
    first_moment, second_moment = _moments(gradient, first, second, scales, values, num_blocks, shares, tile)
    largest_first, largest_second = _maxima(first_moment, second_moment, tile[3])
    # Programs may come in any order: the maximum is the same.
    tl.atomic_max(maxima + block, largest_first.to(tl.int32, bitcast=True), mask=row_exists, sem="relaxed")
    maxima += num_blocks
    tl.atomic_max(maxima + block, largest_second.to(tl.int32, bitcast=True), mask=row_exists, sem="relaxed")


# `maxima` and `corrections` are rows of larger tensors. The kernel need not be compiled again for each alignment.
@triton.jit(do_not_specialize=["maxima", "corrections"])
def update_kernel(
    weight, gradient, first, second, scales, values, codes, blocks, maxima, corrections, flag, num_elements, num_blocks,
    shares, eps, decay, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Step the weights and store the moments; without `maxima`, also their scales, from whole blocks."""
    if flag is not None and tl.load(flag) != 0:
        return
    tile = _tile(blocks, num_elements, WIDTH, ROWS)
    block, row_exists, element, exists = tile
    first_moment, second_moment = _moments(gradient, first, second, scales, values, num_blocks, shares, tile)
    if maxima is None:
        # No other program reads these scales, and this one has read them.
        first_scale, second_scale = _maxima(first_moment, second_moment, exists)
        tl.store(scales + block, first_scale, mask=row_exists)
        tl.store(scales + num_blocks + block, second_scale, mask=row_exists)
    else:
        first_scale = tl.load(maxima + block, mask=row_exists, other=0.0)
        second_scale = tl.load(maxima + num_blocks + block, mask=row_exists, other=0.0)
    _store(first, first_moment, first_scale, codes[0], element, exists)
    _store(second, second_moment, second_scale, codes[1], element, exists)
    rate, factor = tl.load(corrections), tl.load(corrections + 1)
    update = tl.div_rn(first_moment, tl.sqrt_rn(second_moment * factor) + eps)
    stepped = tl.load(weight + element, mask=exists, other=0.0) * decay - update * rate
    tl.store(weight + element, stepped, mask=exists)
