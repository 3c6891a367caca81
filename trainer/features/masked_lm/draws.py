"""Random numbers of rows and positions, from the streams of the row."""

from __future__ import annotations

from torch import Tensor

from trainer.parallel.random import derive_keys

_FLOAT64_BITS = 53  # bits of the integers that float64 holds exactly


def uniforms(keys: Tensor, counters: Tensor) -> Tensor:
    """Return numbers in [0, 1), each from 53 bits of the word of a stream at a counter.

    Args:
        keys: the keys of the streams, int64 `[...]`.
        counters: the counters, int64 `[n]`.

    Returns:
        The numbers, float64 `[..., n]`.
    """
    words = derive_keys(keys, counters)
    # The upper 53 bits, as many as float64 holds; the shift copies the sign bit, which the mask takes away.
    return ((words >> 11) & ((1 << _FLOAT64_BITS) - 1)).double() * 2.0**-_FLOAT64_BITS
