"""Prepared splits, memory-mapped from their cache entries; all ranks and workers of a node share the pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainer.data.order import IndexArray

FlatArray: TypeAlias = NDArray[Any]


class EncodedSplit:
    """A prepared split as columns.

    Row `i` owns `tokens[name][offsets[i] : offsets[i + 1]]`, `scalars[name][i]` and `arrays[name][i]`.

    Args:
        offsets: the start of each row in the flat columns, and the end of the last row, of shape `[rows + 1]`; zeros
            if there are no tokens.
        tokens: the columns with one value for each token, of shape `[all tokens]`, such as `input_ids`; may be empty.
        scalars: the columns with one value for each row, of shape `[rows]`.
        content_hash: the hash of the content, equal for equal content only.
        num_cut: the number of rows that were longer than `data.max_length`.
        reopen: a picklable function that maps the same split in another process; None: the arrays are pickled.
        arrays: the columns with one array for each row, all of one shape, such as images `[rows, ...]`.
    """

    def __init__(
        self,
        offsets: IndexArray,
        tokens: Mapping[str, FlatArray],
        scalars: Mapping[str, FlatArray],
        content_hash: str,
        num_cut: int = 0,
        reopen: Callable[[], EncodedSplit] | None = None,
        arrays: Mapping[str, FlatArray] | None = None,
    ) -> None:
        self.offsets = offsets
        self.tokens = dict(tokens)
        self.scalars = dict(scalars)
        self.arrays = dict(arrays or {})
        self.content_hash = content_hash
        self.num_cut = num_cut
        self.reopen = reopen
        self.lengths: IndexArray = np.diff(offsets)
        # The number of unknown tokens, and of ordinary tokens with the unknown ones; None: not counted.
        self.unknown_tokens: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled memory map would copy the whole data set to each spawned worker.
        if self.reopen is not None:
            return self.reopen, ()
        return EncodedSplit, (
            self.offsets, self.tokens, self.scalars, self.content_hash, self.num_cut, None, self.arrays
        )  # fmt: skip
