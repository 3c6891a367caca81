"""The random words of `trainer.parallel.random` in Triton kernels."""

import triton
import triton.language as tl

from trainer.parallel.random import GOLDEN_GAMMA, INDEX_BITS, ROUNDS

_WORD = 1 << 64
GAMMA = tl.constexpr(GOLDEN_GAMMA)
FIRST_STRIDE = tl.constexpr((GOLDEN_GAMMA << INDEX_BITS) % _WORD)
"""The distance of the keys of neighbours in the first dimension after the batch."""
SECOND_STRIDE = tl.constexpr((GOLDEN_GAMMA << 2 * INDEX_BITS) % _WORD)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = (tl.constexpr(shift) for shift, _ in ROUNDS)
_FACTOR_1, _FACTOR_2 = (tl.constexpr(factor % _WORD) for _, factor in ROUNDS[:2])


@triton.jit
def mix(words):
    """Return SplitMix64's finalizer of uint64 words."""
    words = (words ^ (words >> _SHIFT_1)) * _FACTOR_1
    words = (words ^ (words >> _SHIFT_2)) * _FACTOR_2
    return words ^ (words >> _SHIFT_3)
