"""One prepared split, memory-mapped from its cache entry: all ranks and workers of a node share the same pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainer.data.order import IndexArray

FlatArray: TypeAlias = NDArray[Any]


class EncodedSplit:
    """Rows as columns: row `i` owns `tokens[name][offsets[i] : offsets[i + 1]]`, `scalars[name][i]`, `arrays[name][i]`.

    Args:
        offsets: where each row starts in the flat columns, and where the last one ends `[rows + 1]`; where there are no
            tokens, zeros.
        tokens: the columns with one value for each token `[all tokens]`: `input_ids` and others, or none.
        scalars: the columns with one value for each row `[rows]`.
        content_hash: names the content; equal for equal content only.
        num_cut: rows that were longer than `data.max_length`.
        reopen: maps the same split again in another process; must pickle. None: the arrays themselves travel.
        arrays: the columns with an array for each row, all of one shape, such as images `[rows, ...]`.
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
        # Tokens unknown to the tokenizer, and ordinary tokens with these; None: not counted.
        self.unknown_tokens: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled memory map would carry the whole data set to each spawned worker.
        if self.reopen is not None:
            return self.reopen, ()
        return EncodedSplit, (
            self.offsets, self.tokens, self.scalars, self.content_hash, self.num_cut, None, self.arrays
        )  # fmt: skip
