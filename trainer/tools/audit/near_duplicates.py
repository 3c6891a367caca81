"""Texts that are nearly the same: MinHash by datasketch (Broder 1997), and the Jaccard index of the candidates.

A text is the set of its runs of three words, or of five characters if it has fewer words. Texts with an index of
`THRESHOLD` or more are near duplicates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

THRESHOLD = 0.8
_BANDS, _ROWS = 25, 5  # finds 0.9999 of the pairs at the threshold: 1 - (1 - 0.8 ** 5) ** 25
_WORDS, _CHARACTERS = 3, 5
_MOST_CHARACTERS = 50_000  # of a text; the rest is not compared
_WORD = re.compile(r"\w+")
_AT_ONCE = 2000
_NEIGHBOURS = 3  # texts of a bucket that each is compared with, beside the first


def is_installed() -> bool:
    """Return whether the package that computes MinHashes is installed."""
    return find_spec("datasketch") is not None


def shingles(text: str) -> set[str]:
    """Return the runs of words or characters of a text."""
    text = text[:_MOST_CHARACTERS].casefold()
    words = _WORD.findall(text)
    if len(words) >= 2 * _WORDS:
        return {" ".join(words[place : place + _WORDS]) for place in range(len(words) - _WORDS + 1)}
    joined = " ".join(words)
    return (
        {joined[place : place + _CHARACTERS] for place in range(max(1, len(joined) - _CHARACTERS + 1))}
        if joined
        else set()
    )


def jaccard(first: set[str], second: set[str]) -> float:
    """Return the size of the intersection of two sets over that of their union."""
    both = len(first & second)
    return both / (len(first) + len(second) - both) if both else 0.0


def bands(texts: Iterable[str]) -> NDArray[np.uint64]:
    """Return the hash of each band of the MinHashes of texts `[texts, bands]`; texts without runs have zeros."""
    from datasketch import MinHash

    sets = [[part.encode("utf-8", "surrogatepass") for part in shingles(text)] for text in texts]
    found: NDArray[np.uint64] = np.zeros((len(sets), _BANDS), np.uint64)
    hashes: Iterable[Any] = MinHash.generator(sets, num_perm=_BANDS * _ROWS)
    for row, (minhash, parts) in enumerate(zip(hashes, sets, strict=True)):
        if parts:
            values = np.asarray(minhash.hashvalues, np.uint64).reshape(_BANDS, _ROWS)
            found[row] = _mixed(values)
    return found


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return one number for the values of each band `[bands, values]`."""
    mixed: NDArray[np.uint64] = np.zeros(len(values), np.uint64)
    for column in values.T:
        mixed = (mixed ^ column) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return mixed | np.uint64(1)  # zeros stand for texts without runs


def candidates(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return pairs of texts `[pairs, 2]` with an equal band; a text is paired with few others of a large bucket."""
    number = len(keys)
    found: NDArray[np.int64] = np.zeros(0, np.int64)
    for column in keys.T:
        order = np.argsort(column, kind="stable")
        ordered = column[order]
        starts = np.flatnonzero(np.diff(ordered, prepend=~ordered[:1])) if number else np.zeros(0, np.int64)
        first: NDArray[np.int64] = np.repeat(starts, np.diff(starts, append=number))
        places = np.arange(number)
        codes = []
        for other in (first, *(np.maximum(first, places - step) for step in range(1, _NEIGHBOURS + 1))):
            chosen = (other < places) & (ordered > 0)
            pair = np.sort(np.stack([order[other[chosen]], order[places[chosen]]]), axis=0)
            codes.append(pair[0] * number + pair[1])
        found = np.unique(np.concatenate([found, *codes]))
    return np.stack(np.divmod(found, max(1, number)), axis=1)


def near(
    pairs: NDArray[np.int64], texts_of: Callable[[Sequence[int]], Sequence[str]]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the pairs with an index of `THRESHOLD` or more, and their indices; `texts_of` reads texts by number."""
    kept: list[NDArray[np.int64]] = [np.zeros((0, 2), np.int64)]
    indices: list[NDArray[np.float64]] = [np.zeros(0)]
    for start in range(0, len(pairs), _AT_ONCE):
        part = pairs[start : start + _AT_ONCE]
        numbers = np.unique(part)
        sets = dict(zip(numbers.tolist(), map(shingles, texts_of(numbers.tolist())), strict=True))
        found = np.array([jaccard(sets[first], sets[second]) for first, second in part.tolist()])
        kept.append(part[found >= THRESHOLD])
        indices.append(found[found >= THRESHOLD])
    return np.concatenate(kept), np.concatenate(indices)
