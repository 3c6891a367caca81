"""Texts of a split with the same tokens, which are ties in every metric."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trainer.tasks.types import EncodedRows

MOST_COMPARED = 500_000
"""Rows; comparing more takes seconds at each start."""


def texts_of(encoded: EncodedRows, texts_per_row: int = 1) -> Iterator[bytes]:
    """Yield the token ids of each text, or of each row of several texts."""
    ids = encoded.tokens["input_ids"]
    for start, end in pairwise(encoded.offsets[::texts_per_row].tolist()):
        yield ids[start:end].tobytes()


def first_of_equal(encoded: EncodedRows) -> NDArray[np.int64]:
    """Return for each text the first one with the same tokens, of shape `[texts]`.

    Padding changes the rounding of an output, and so would break the ties of equal texts. Their outputs are therefore
    taken from the first one.
    """
    bounds, columns = encoded.offsets.tolist(), list(encoded.tokens.values())
    first: dict[bytes, int] = {}
    tokens = (b"".join(column[slice(*span)].tobytes() for column in columns) for span in pairwise(bounds))
    # Digests, because the tokens as keys would take the memory of the whole split.
    keys = (blake2b(of_text, digest_size=16).digest() for of_text in tokens)
    return np.array([first.setdefault(key, text) for text, key in enumerate(keys)], np.int64)
