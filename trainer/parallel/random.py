"""Random bits as a pure function of coordinates, for dropout masks that do not depend on the layout.

The state of a generator depends on all earlier draws, hence on the layout. Here, each 64-bit word is the output of
SplitMix64 (Steele, Lea & Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014) at a counter: the
finalizer applied to `key + counter * GOLDEN_GAMMA`. Any rank can compute any slice of the mask that one process would
draw. A recomputation draws it again, and no state is saved.

The words are int64, because torch's CPU kernels are slow on unsigned ones. Each serves four elements of 16 bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

MAX_INDEX_DIMS = 2
"""The largest number of dimensions of a mask between its batch and the elements of a row."""

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
INDEX_BITS = 21  # bits of a counter for each index of an element: its word in the row, and the dimensions before
LANES = 4  # elements served by one 64-bit word
LANE_LEVELS = 1 << 16


def _signed(word: int) -> int:
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)


_GAMMA = _signed(GOLDEN_GAMMA)
# shift and multiplier of each round of the finalizer (variant 13 of Stafford's mixers, as SplitMix64 uses it)
ROUNDS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, None))


def _mix_(words: Tensor) -> Tensor:
    """Apply SplitMix64's finalizer to int64 `words` of any shape, in place."""
    shifted = torch.empty_like(words)
    for shift, multiplier in ROUNDS:
        torch.bitwise_right_shift(words, shift, out=shifted)  # copies the sign bit, which the mask takes away
        words.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1))
        if multiplier is not None:
            words.mul_(multiplier)
    return words


def stream_key(*parts: int | str) -> int:
    """Return a 64-bit key for a named stream, such as (seed, step, site), stable across processes and versions."""
    return stream_keys(parts[:1], [parts[1:]])[0]


def stream_keys(first: Sequence[int | str], rest: Iterable[Sequence[int | str]]) -> list[int]:
    """Return `stream_key(*first, *parts)` for each `parts` of `rest`; the hash of `first` is computed once."""
    begun = hashlib.blake2b(_text(first), digest_size=8)
    keys = []
    for parts in rest:
        whole = begun.copy()
        if parts:
            # The hashed bytes are those of `_text` for all parts together.
            whole.update(b"\x00" + _text(parts))
        keys.append(int.from_bytes(whole.digest(), "little", signed=True))
    return keys


def _text(parts: Sequence[int | str]) -> bytes:
    # With the type of each part, the number 1 and the text "1" give different keys.
    return "\x00".join([f"{type(part).__name__}:{part}" for part in parts]).encode()


def seed_generator(device: torch.device, seed: int) -> None:
    """Seed torch's generator of `device` and no other; `torch.manual_seed` seeds those of all backends."""
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def derive_keys(keys: Tensor, counters: Tensor) -> Tensor:
    """Return keys one level deeper: the word of each stream of `keys` at each of `counters`.

    Args:
        keys: the keys of the streams, int64 `[...]`.
        counters: the counters, int64 `[n]`.

    Returns:
        The words, int64 `[..., n]`.
    """
    return _mix_(keys.unsqueeze(-1) + counters * _GAMMA)


def keep_mask(keys: Tensor, num_columns: int, probability: float, first_column: int = 0) -> Tensor:
    """Return the mask of kept elements: 1 with probability `1 - quantised(probability)`, else 0.

    Args:
        keys: the keys of the streams, one for each row of elements, int64 `[...]`.
        num_columns: the number of elements to draw in each row.
        probability: the share to drop, in [0, 1).
        first_column: the start of the drawn slice in the whole row.

    Returns:
        The mask from column `first_column` of the whole row on, uint8 `[..., num_columns]`. Torch's CPU kernels compare
        into uint8, and multiply by it, several times faster than with bool.
    """
    lanes = random_lanes(keys, num_columns, first_column)
    # Lanes are int16 and begin at -32768, so the threshold moves down by half of the levels.
    threshold = dropped_levels(probability) - LANE_LEVELS // 2
    return torch.ge(lanes, threshold, out=torch.empty(lanes.shape, dtype=torch.uint8, device=keys.device))


def pointwise_mask(keys: Tensor, num_columns: int, probability: float, first_column: int = 0) -> Tensor:
    """Return `keep_mask` as bool, by pointwise operations that a compiler fuses with others.

    Each element computes its word. Products must wrap modulo 2**64 in the compiler's code, as in that of Triton.
    """
    columns = indices(first_column, num_columns, keys.device)
    words = keys.unsqueeze(-1) + (columns >> 2) * _GAMMA
    for shift, multiplier in ROUNDS:
        words = words ^ ((words >> shift) & ((1 << (64 - shift)) - 1))
        if multiplier is not None:
            words = words * multiplier
    # The lane of the element becomes the upper bits of the word; the bits below them do not change the comparison.
    lanes = words << (48 - 16 * (columns & (LANES - 1)))
    return lanes >= (dropped_levels(probability) - LANE_LEVELS // 2) * (1 << 48)


def indices(start: int, size: int, device: torch.device) -> Tensor:
    """Return the int64 numbers from `start` on, for products with numbers above 32 bits."""
    numbers = torch.arange(start, start + size, device=device)
    # Without another operation, Inductor's code for Triton multiplies numbers of 32 bits, which Triton refuses.
    return numbers | 0 if torch.compiler.is_compiling() else numbers


def random_lanes(keys: Tensor, num_columns: int, first_column: int = 0) -> Tensor:
    """Return 16 random bits for each element of rows, as int16 `[..., num_columns]`; see `keep_mask`."""
    first_word, last_word = first_column // LANES, (first_column + num_columns + LANES - 1) // LANES
    words = derive_keys(keys, torch.arange(first_word, last_word, device=keys.device))
    start = first_column - first_word * LANES
    # The lowest 16 bits of a word come first, as on all little-endian machines; the kernels shift in this order.
    return words.view(torch.int16)[..., start : start + num_columns]


def quantised(probability: float) -> float:
    """Return the share that `keep_mask` drops: `probability` rounded to the nearest 1/65536, always below 1."""
    return dropped_levels(probability) / LANE_LEVELS


def dropped_levels(probability: float) -> int:
    """Return the number of the 65536 values of a lane that drop its element."""
    # Below 1, because the kept share is a divisor.
    return min(round(probability * LANE_LEVELS), LANE_LEVELS - 1)


def row_keys(keys: Tensor | int, rows: Tensor) -> Tensor:
    """Return the keys of the streams of the rows of a batch, as `derive_keys`.

    Args:
        keys: the key of one site, from `stream_key`, or those of several, int64 `[sites, 1]`.
        rows: the index of each row in its global batch, int64 `[batch]`.

    Returns:
        The keys, int64 `[batch]` or `[sites, batch]`.
    """
    return _mix_(rows * _GAMMA + keys)


def element_keys(keys: Tensor, shape: Sequence[int], offsets: Sequence[int]) -> Tensor:
    """Return the keys of the streams that draw a tensor `[batch, *shape, features]`, one for each row of features.

    An index of a dimension of `shape` (below 2^21) takes 21 bits of the counter, above those that count the words. No
    two elements of a batch row share a word.

    Args:
        keys: the keys of the rows of the batch, from `row_keys`, int64 `[batch]`.
        shape: the sizes of the dimensions between batch and features, at most two: positions, or heads and positions.
        offsets: the start of this rank's slice of each of these dimensions.

    Returns:
        The keys, int64 `[batch, *shape]`.
    """
    assert len(shape) <= MAX_INDEX_DIMS, f"a counter has no room for the indices of {len(shape)} dimensions"
    for level, (size, offset) in enumerate(zip(shape, offsets, strict=True), start=1):
        # Products wrap modulo 2**64. So `index * stride` moves the counter by `index << level * 21`.
        stride = _signed(GOLDEN_GAMMA << level * INDEX_BITS)
        keys = keys.unsqueeze(-1) + indices(offset, size, keys.device) * stride
    return keys


def token_keys(keys: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """Return the keys of `element_keys` for a tensor `[batch, positions, features]` at some of its positions only.

    Args:
        keys: the keys of the rows of the batch, int64 `[batch]`.
        rows: the row of each token in the batch, int64 `[tokens]`.
        positions: its position in the row, int64 `[tokens]`.

    Returns:
        The keys, int64 `[tokens]`.
    """
    return keys[rows] + positions * _signed(GOLDEN_GAMMA << INDEX_BITS)
