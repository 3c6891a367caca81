"""Types of task arguments; `datasets` and transformers are imported for type checking only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import datasets
    import transformers

    Dataset: TypeAlias = datasets.Dataset
    Tokenizer: TypeAlias = transformers.PreTrainedTokenizerBase
else:
    Dataset = Any
    Tokenizer = Any


class EncodedRows(Protocol):
    """The part of `trainer.data.split.EncodedSplit` that tasks use: the columns that `encode` returned."""

    def __len__(self) -> int: ...

    @property
    def offsets(self) -> NDArray[np.int64]: ...

    @property
    def tokens(self) -> Mapping[str, NDArray[Any]]: ...

    @property
    def scalars(self) -> Mapping[str, NDArray[Any]]: ...

    @property
    def arrays(self) -> Mapping[str, NDArray[Any]]: ...


Encoded: TypeAlias = dict[str, list[Any]]
"""Encoded rows, by column: one value for each row."""

ROWS_PICTURED = 5
"""The rows of texts in the picture of an evaluation."""


@dataclass(frozen=True)
class EvaluatedSplit:
    """A split with its encoded rows, for metrics and outputs that need the texts."""

    rows: Dataset
    encoded: EncodedRows
    tokenizer: Tokenizer | None  # None: the rows are not texts
    where: str = ""

    @property
    def few(self) -> Dataset:
        """The first rows, for a picture."""
        return self.rows.select(range(min(len(self.rows), ROWS_PICTURED)))
