"""Types of task arguments; `datasets`, Pillow and transformers are imported for type checking only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import datasets
    import PIL.Image
    import transformers

    Dataset: TypeAlias = datasets.Dataset
    Image: TypeAlias = PIL.Image.Image
    Tokenizer: TypeAlias = transformers.PreTrainedTokenizerBase
else:
    Dataset = Any
    Image = Any
    Tokenizer = Any


class ImageProcessor(Protocol):
    """Preparation of an image for the model, without normalisation."""

    def __call__(self, image: Image) -> NDArray[np.uint8]:
        """Return the resized image, of shape `[channels, height, width]`."""
        ...


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
    tokenizer: Tokenizer | None  # None: the rows are images
    where: str = ""

    @property
    def few(self) -> Dataset:
        """The first rows, for a picture."""
        return self.rows.select(range(min(len(self.rows), ROWS_PICTURED)))
