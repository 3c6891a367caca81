"""The classes of other libraries that tasks take as arguments, named without importing those at run time."""

from __future__ import annotations

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
    """Makes of an image what the model reads, before it is normalised."""

    def __call__(self, image: Image) -> NDArray[np.uint8]:
        """The image resized, `[channels, height, width]`."""
        ...
