"""Random bits as a pure function of coordinates: what makes a dropout mask independent of the layout.

A generator's state depends on everything drawn before it, hence on the layout. Here each 64-bit word is the SplitMix64
generator (Steele, Lea & Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014) read at a counter: its
finalizer applied to `key + counter * GOLDEN_GAMMA`. Any rank can so compute any slice of the mask that one process
would have drawn, a recomputation replays it, and no state need be saved.

Torch has no logical shift for signed words and its CPU kernels are slow on unsigned ones, so the words are int64, the
shifts are masked, and each word serves four elements of 16 bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

MAX_INDEX_DIMS = 2
"""The most dimensions that a mask may have between its batch and the elements of a row."""

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_INDEX_BITS = 21  # of a counter, for each index of an element: the word of its row, and the dimensions before that
_LANES = 4  # elements served by one 64-bit word
_LANE_LEVELS = 1 << 16
_FLOAT64_BITS = 53  # of a number that float64 holds exactly


def _signed(word: int) -> int:
    """The int64 with the last 64 bits of `word`."""
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)


_GAMMA = _signed(_GOLDEN_GAMMA)
# shift and multiplier of each round of the finalizer (variant 13 of Stafford's mixers, as SplitMix64 uses it)
_ROUNDS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, None))


def _mix_(words: Tensor) -> Tensor:
    """Applies SplitMix64's finalizer to int64 `words` of any shape, in place."""
    shifted = torch.empty_like(words)
    for shift, multiplier in _ROUNDS:
        torch.bitwise_right_shift(words, shift, out=shifted)
        words.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1))
        if multiplier is not None:
            words.mul_(multiplier)
    return words


def stream_key(*parts: int | str) -> int:
    """A 64-bit key for a named stream, such as (seed, step, site); stable across processes and versions."""
    text = "\x00".join(f"{type(part).__name__}:{part}" for part in parts)
    return _signed(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))


def seed_generator(device: torch.device, seed: int) -> None:
    """Seeds the generator that torch draws from on `device`, and no other (`torch.manual_seed` asks every backend)."""
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def derive_keys(keys: Tensor, counters: Tensor) -> Tensor:
    """Keys one level deeper: the word of each stream of `keys` at each of `counters`.

    Args:
        keys: int64 `[...]`.
        counters: int64 `[n]`.

    Returns:
        int64 `[..., n]`.
    """
    return _mix_(keys.unsqueeze(-1) + counters * _GAMMA)


def uniforms(keys: Tensor, counters: Tensor) -> Tensor:
    """Numbers in [0, 1), each from 53 bits of the word of its stream at its counter.

    Args:
        keys: int64 `[...]`, one stream each.
        counters: int64 `[n]`.

    Returns:
        float64 `[..., n]`.
    """
    words = derive_keys(keys, counters)
    return ((words >> 11) & ((1 << _FLOAT64_BITS) - 1)).double() * 2.0**-_FLOAT64_BITS


def keep_mask(keys: Tensor, num_columns: int, probability: float, first_column: int = 0) -> Tensor:
    """Which elements a dropout keeps: 1 with probability `1 - quantised(probability)`.

    Args:
        keys: int64 `[...]`, one stream a row of elements.
        num_columns: elements drawn of each row.
        probability: share to drop, in [0, 1).
        first_column: where in the whole row the drawn slice begins.

    Returns:
        uint8 `[..., num_columns]`: columns `first_column` onward of the whole row's mask. (uint8, not bool: torch's CPU
        kernels compare into it, and multiply by it, several times faster.)
    """
    first_word, last_word = first_column // _LANES, (first_column + num_columns + _LANES - 1) // _LANES
    words = derive_keys(keys, torch.arange(first_word, last_word, device=keys.device))
    lanes = words.view(torch.int16)
    threshold = _dropped_levels(probability) - _LANE_LEVELS // 2
    start = first_column - first_word * _LANES
    lanes = lanes[..., start : start + num_columns]
    return torch.ge(lanes, threshold, out=torch.empty(lanes.shape, dtype=torch.uint8, device=keys.device))


def quantised(probability: float) -> float:
    """The share that `keep_mask` really drops: `probability` to the nearest 1/65536, and never all."""
    return _dropped_levels(probability) / _LANE_LEVELS


def _dropped_levels(probability: float) -> int:
    """How many of the 65536 values of a lane mean that its element is dropped."""
    return min(round(probability * _LANE_LEVELS), _LANE_LEVELS - 1)


def element_keys(key: int, rows: Tensor, shape: Sequence[int], offsets: Sequence[int]) -> Tensor:
    """The stream of each row of elements in a tensor whose first dimension is `rows` and whose last is drawn from it.

    Only the key of each row of the batch is mixed. An index of the dimensions between (below 2^21) takes 21 bits of the
    counter, above those that count the words, so that within a batch row no two elements share a word.

    Args:
        key: of the site, from `stream_key`.
        rows: int64 `[batch]`, the place of each row in its global batch.
        shape: sizes of the dimensions between the first and the last, two at most: positions, or heads and positions.
        offsets: where this rank's slice of each of these dimensions begins.

    Returns:
        int64 `[batch, *shape]`.
    """
    assert len(shape) <= MAX_INDEX_DIMS, f"a counter has no room for the indices of {len(shape)} dimensions"
    keys = _mix_(rows * _GAMMA + key)  # as `derive_keys`; a key as a tensor would make the host wait for its copy
    for level, (size, offset) in enumerate(zip(shape, offsets, strict=True), start=1):
        stride = _signed(_GOLDEN_GAMMA << level * _INDEX_BITS)
        keys = keys.unsqueeze(-1) + torch.arange(offset, offset + size, device=rows.device) * stride
    return keys
