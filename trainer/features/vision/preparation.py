"""The preparation of rows of images: from files to the inputs of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.data.encoding import RowEncoding
from trainer.data.order import IndexArray
from trainer.data.sources import Split
from trainer.data.split import EncodedSplit
from trainer.features.vision.image_classification import ImageTask
from trainer.features.vision.image_split import ImageRows, encode_images
from trainer.features.vision.processor import ImageProcessor, load_image_processor
from trainer.models.configuration import checkpoint_labels, load_config
from trainer.recipe.schema import Model, Recipe
from trainer.tasks.task import Task
from trainer.training.preparation import Preparation


def load_preparation(recipe: Recipe) -> ImagePreparation:
    """Return the preparation for the recipe's model.

    Raises:
        UsageError: The model has no image processor, or it cannot be reached.
    """
    config = load_config(recipe.model, {})
    processor = load_image_processor(recipe.model, config)
    return ImagePreparation(processor, checkpoint_labels(recipe.model, config), config)


@dataclass(frozen=True)
class Normalisation:
    """Normalisation of 8-bit images: `(value * scale - mean) / std`, with one mean and one deviation per channel."""

    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def inputs(
        self, split: EncodedSplit, row_ids: IndexArray, as_wide_as: IndexArray | None = None
    ) -> dict[str, Tensor]:
        """Return the images as float32 `[batch, channels, height, width]`."""
        return {name: self(torch.from_numpy(values[row_ids])) for name, values in split.arrays.items()}

    def __call__(self, pixels: Tensor) -> Tensor:
        """Normalise images, uint8 `[..., channels, height, width]`."""
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return pixels.float().mul_(self.scale).sub_(mean).div_(std)


@dataclass(frozen=True)
class ImagePreparation(Preparation):
    """Resizes images; their values are normalised in each batch."""

    processor: ImageProcessor
    labels: tuple[str, ...] | None = None
    config: Any = None

    @property
    def batching(self) -> Normalisation:
        return Normalisation(self.processor.scale, self.processor.mean, self.processor.std)

    @property
    def normalisation(self) -> str:
        return str(self.batching)

    @property
    def other_processor(self) -> dict[str, Any]:
        options = {"input_data_format": "channels_last"}
        return {"name": "AutoImageProcessor", "options": options, "inputs": ["pixel_values"]}

    def recording(self) -> ImagePreparation:
        return replace(self, processor=_Recorder(self.processor))

    def recorded(self, rows: Sequence[int], num_rows: int) -> list[NDArray[np.uint8]]:
        assert isinstance(self.processor, _Recorder)
        seen = self.processor.seen[-num_rows:]
        return [seen[row] if seen[row].ndim == 3 else seen[row][:, :, None] for row in rows]

    def prepares_for(self, model: Model, config: Any) -> bool:
        own, other = self.processor, load_image_processor(model, config)
        # Equal processors make equal pixels of one image, whatever their names are.
        image = PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (37, 53, 3), np.uint8))
        constants = [(p.scale, p.mean, p.std) for p in (own, other)]
        return constants[0] == constants[1] and np.array_equal(own(image), other(image))

    def encode(self, split: Split, task: Task, cache: Path) -> EncodedSplit:
        assert isinstance(task, ImageTask)
        return encode_images(split, task, self.processor, cache)

    def encoding(self, task: Task, first: EncodedSplit) -> RowEncoding:
        assert isinstance(task, ImageTask)
        encode = ImageRows(task, self.processor, shape=first.arrays["pixel_values"].shape[1:])
        return RowEncoding(task, encode, partial(task.packer, 0), {"processor": self.processor.fingerprint})

    def save(self, folder: Path) -> None:
        self.processor.save(folder)


class _Recorder(ImageProcessor):
    """An image processor that keeps the images which it has seen, in the channels of the model."""

    def __init__(self, processor: ImageProcessor) -> None:
        # The fields of a processor that is made already; a new one would be probed again.
        vars(self).update(vars(processor))
        self.seen: list[NDArray[np.uint8]] = []

    def pixels(self, image: Any) -> NDArray[np.uint8]:
        self.seen.append(super().pixels(image))
        return self.seen[-1]
