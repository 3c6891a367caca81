"""The blocks of the attention kernels, by the capability of the GPU, the type and the size of heads.

The blocks are fixed, and no search by timing chooses them at a start: they order the sums, so a resumed run would
differ. `tests/features/kernels/test_compiled_kernels.py` compiles every row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from trainer.parallel import kernel_support

_LEAST_DIM = 16  # of a matrix product in Triton
KEYS_OF_WORD = 32
"""The neighbouring keys of a word of bits of a dropout mask."""
TILE = 128
"""The queries and keys of the tiles in which visible keys are listed; all blocks divide them."""


class Block(NamedTuple):
    """The queries and keys of one step of a kernel, and its warps and stages."""

    queries: int
    keys: int
    warps: int
    stages: int


class Blocks(NamedTuple):
    """The blocks of the kernels; the gradient of a bias has those of the queries' gradient."""

    forward: Block
    of_queries: Block
    of_keys: Block


STACK_BYTES = {16: 64, 32: 512}
"""The most bytes a thread that a kernel spills, by the bits of the type."""


_SMALL, _HOPPER, _BLACKWELL, _ALL = "8.x and 12.x", "9.0", "10.x", "all"
# By the capabilities, the bits of the type, the padded size of heads (64 also for smaller ones without a row), and
# whether a kernel reads tiles of a bias or an additive mask. Blocks of `_SMALL` and `_ALL` fit 99 KiB of shared memory,
# the others 227.
#
# Timed on an H200 (capability 9.0, 12 heads of 64, bf16, dropout 0.1, 128 rows of 128 / 42 of 384 / 2 of 8,192 tokens):
# forward 54 / 117 / 2,228 microseconds, queries' gradient 68 / 123 / 2,124, keys' gradient 107 / 212 / 3,495. Blocks of
# 8 warps took up to 2.6 times as long; a keys' gradient that spills 32 bytes was faster than all that spill none.
# 32 causal heads of 128, 2 rows of 2,048: forward 326, queries' gradient 383. A keys' gradient of (32, 64, 4, 1) takes
# 671, some 500 less than this one, but spills 112 to 320 bytes.
# No GPU has timed the other rows. They follow these: 4 warps, then as many queries and keys as spill little.
# Products of fp32 keep whole rows in registers: smaller blocks spill less, but read shared memory for each product.
_ROWS = {
    # The blocks of 64 have too few registers for heads of 32: their keys' gradient spills 88 to 208 bytes.
    (_SMALL, 16, 32, False): Blocks(Block(64, 32, 4, 3), Block(64, 32, 4, 3), Block(32, 32, 4, 2)),
    (_SMALL, 16, 64, False): Blocks(Block(64, 32, 4, 3), Block(64, 32, 4, 3), Block(64, 32, 4, 2)),
    (_SMALL, 16, 64, True): Blocks(Block(64, 64, 4, 1), Block(64, 32, 4, 1), Block(32, 32, 4, 1)),
    (_SMALL, 16, 128, False): Blocks(Block(64, 32, 4, 2), Block(64, 32, 4, 2), Block(32, 32, 4, 2)),
    (_SMALL, 16, 128, True): Blocks(Block(64, 32, 4, 1), Block(32, 32, 4, 1), Block(32, 32, 4, 1)),
    (_SMALL, 16, 256, False): Blocks(Block(64, 32, 8, 2), Block(32, 32, 8, 1), Block(32, 32, 8, 1)),
    (_SMALL, 16, 256, True): Blocks(Block(64, 32, 8, 1), Block(32, 32, 8, 1), Block(32, 32, 8, 1)),
    (_HOPPER, 16, 64, False): Blocks(Block(64, 32, 4, 3), Block(64, 32, 4, 3), Block(32, 64, 4, 3)),
    (_HOPPER, 16, 64, True): Blocks(Block(64, 64, 4, 1), Block(64, 32, 4, 1), Block(32, 64, 4, 1)),
    (_HOPPER, 16, 128, False): Blocks(Block(128, 64, 8, 3), Block(64, 32, 4, 3), Block(32, 32, 4, 3)),
    (_HOPPER, 16, 128, True): Blocks(Block(64, 32, 4, 1), Block(64, 32, 4, 1), Block(32, 32, 4, 1)),
    (_HOPPER, 16, 256, False): Blocks(Block(128, 32, 8, 2), Block(32, 32, 8, 1), Block(32, 32, 8, 1)),
    (_HOPPER, 16, 256, True): Blocks(Block(64, 16, 8, 1), Block(32, 32, 8, 1), Block(32, 32, 8, 1)),
    (_BLACKWELL, 16, 64, False): Blocks(Block(64, 32, 4, 3), Block(64, 32, 4, 3), Block(32, 64, 4, 2)),
    (_BLACKWELL, 16, 64, True): Blocks(Block(64, 64, 4, 1), Block(64, 32, 4, 1), Block(32, 64, 4, 1)),
    (_BLACKWELL, 16, 128, False): Blocks(Block(64, 32, 4, 3), Block(64, 32, 4, 3), Block(32, 32, 4, 2)),
    (_BLACKWELL, 16, 128, True): Blocks(Block(64, 32, 4, 1), Block(64, 32, 4, 1), Block(32, 32, 4, 1)),
    (_BLACKWELL, 16, 256, False): Blocks(Block(128, 32, 8, 2), Block(64, 32, 8, 1), Block(32, 32, 8, 1)),
    (_BLACKWELL, 16, 256, True): Blocks(Block(64, 32, 8, 1), Block(32, 32, 8, 1), Block(32, 32, 8, 1)),
    (_ALL, 32, 64, False): Blocks(Block(32, 32, 8, 1), Block(32, 32, 8, 1), Block(32, 32, 8, 1)),
    (_ALL, 32, 64, True): Blocks(Block(64, 32, 8, 1), Block(32, 32, 8, 1), Block(32, 32, 8, 1)),
    (_ALL, 32, 128, False): Blocks(Block(32, 32, 8, 1), Block(32, 32, 8, 1), Block(16, 32, 8, 1)),
    # With one stage, a causal keys' gradient with a bias gets 64 registers on 8.0, and spills 1,288 bytes. Those of the
    # queries spill 2,320 bytes with heads of 80 on 12.0.
    (_ALL, 32, 128, True): Blocks(Block(32, 32, 8, 1), Block(32, 32, 8, 2), Block(16, 32, 8, 2)),
    (_ALL, 32, 256, False): Blocks(Block(16, 16, 8, 1), Block(16, 16, 8, 1), Block(16, 16, 8, 1)),
    (_ALL, 32, 256, True): Blocks(Block(16, 32, 8, 1), Block(16, 16, 8, 2), Block(16, 16, 8, 1)),
}
# Rows that are joined with others keep their places in registers: with three stages, this kernel spills up to 96 bytes.
_KEYS_OF_JOINED = {(_HOPPER, 16, 64, False): Block(32, 64, 4, 2)}
_OF_INTERPRETER = Blocks(Block(32, 16, 1, 1), Block(32, 32, 1, 1), Block(16, 32, 1, 1))


def blocks(device: torch.device, dtype: torch.dtype, dim: int, has_floats: bool, joined: bool = False) -> Blocks:
    """Return the blocks of a call.

    Args:
        has_floats: whether there is a bias or an additive mask.
        joined: whether the rows lie one after the other, without padding.
    """
    if kernel_support.is_interpreted():
        return _OF_INTERPRETER
    return of_capability(kernel_support.capability(device), dtype, dim, has_floats, joined)


def of_capability(
    capability: tuple[int, int], dtype: torch.dtype, dim: int, has_floats: bool, joined: bool = False
) -> Blocks:
    """Return the blocks of a call on a GPU; see `blocks`."""
    bits = torch.finfo(dtype).bits
    gpus = _ALL if bits == 32 else {9: _HOPPER, 10: _BLACKWELL}.get(capability[0], _SMALL)
    size = padded(dim)
    key = (gpus, bits, size, has_floats)
    key = key if key in _ROWS else (gpus, bits, max(64, size), has_floats)
    of_keys = _KEYS_OF_JOINED.get(key) if joined else None
    return _ROWS[key]._replace(of_keys=of_keys) if of_keys else _ROWS[key]


def tile() -> tuple[int, int]:
    """Return the queries and keys of a tile: `TILE`, or those of the interpreter, which divide it."""
    return (32, 32) if kernel_support.is_interpreted() else (TILE, TILE)


def padded(dim: int) -> int:
    """Return the size of a head in the kernels: a power of two."""
    return max(_LEAST_DIM, 1 << (dim - 1).bit_length())
