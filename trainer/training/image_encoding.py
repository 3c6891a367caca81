"""The preparation of rows of images: from files to the inputs of the model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainer.data.collate import Normalisation
from trainer.data.encoding import RowEncoding
from trainer.data.image_split import ImageRows, encode_images
from trainer.data.sources import Split
from trainer.data.split import EncodedSplit
from trainer.models.image_processor import ImageProcessor
from trainer.tasks.task import ImageTask, Task
from trainer.training.preparation import Preparation


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

    def encode(self, split: Split, task: Task, cache: Path) -> EncodedSplit:
        assert isinstance(task, ImageTask)
        return encode_images(split, task, self.processor, cache)

    def encoding(self, task: Task, first: EncodedSplit) -> RowEncoding:
        assert isinstance(task, ImageTask)
        encode = ImageRows(task, self.processor, shape=first.arrays["pixel_values"].shape[1:])
        return RowEncoding(task, encode, partial(task.packer, 0), {"processor": self.processor.fingerprint})

    def save(self, folder: Path) -> None:
        self.processor.save(folder)
