"""Types of task arguments; `datasets`, Pillow and transformers are imported for type checking only."""

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
    """Preparation of an image for the model, without normalisation."""

    def __call__(self, image: Image) -> NDArray[np.uint8]:
        """Return the resized image, of shape `[channels, height, width]`."""
        ...
