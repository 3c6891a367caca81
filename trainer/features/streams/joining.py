"""Rows of several windows as one split in memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer.data.order import IndexArray
from trainer.data.split import EncodedSplit, FlatArray, Ragged


def joined_rows(parts: Sequence[tuple[EncodedSplit, IndexArray]]) -> EncodedSplit:
    """Return rows of several splits with the same columns as a split in memory.

    Args:
        parts: splits, and the indices of their rows, at least one over all.
    """
    parts = [(split, rows) for split, rows in parts if len(rows)]
    first = parts[0][0]
    tokens: dict[str, list[FlatArray]] = {name: [] for name in first.tokens}
    ragged: dict[str, list[FlatArray]] = {name: [] for name in first.ragged}
    of_ragged: dict[str, list[IndexArray]] = {name: [np.zeros(1, np.int64)] for name in first.ragged}
    lengths = []
    for split, rows in parts:
        texts = split.texts_of(rows).ravel()
        places = _places(split.offsets, texts)
        lengths.append(split.offsets[texts + 1] - split.offsets[texts])
        for name, found in tokens.items():
            found.append(split.tokens[name][places])
        for name, found in ragged.items():
            column = split.ragged[name]
            of_ragged[name].append(column.lengths_of(rows))
            found.append(column.values[_places(column.offsets, rows)])
    return EncodedSplit(
        np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths])),
        {name: np.concatenate(found) for name, found in tokens.items()},
        {name: np.concatenate([split.scalars[name][rows] for split, rows in parts]) for name in first.scalars},
        content_hash="",
        arrays={name: np.concatenate([split.arrays[name][rows] for split, rows in parts]) for name in first.arrays},
        ragged={
            name: Ragged(np.cumsum(np.concatenate(of_ragged[name])), np.concatenate(found))
            for name, found in ragged.items()
        },
        texts_per_row=first.texts_per_row,
    )


def _places(offsets: IndexArray, owners: IndexArray) -> IndexArray:
    starts, ends = offsets[owners], offsets[owners + 1]
    return np.concatenate([np.arange(start, end) for start, end in zip(starts, ends, strict=True)])
