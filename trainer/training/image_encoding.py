"""The preparation of rows of images: from files to the inputs of the model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainer.data.collate import Normalisation
from trainer.data.image_split import encode_images, encode_streamed
from trainer.data.sources import Split, Stream
from trainer.data.split import EncodedSplit
from trainer.data.streamed_split import WindowEncoder
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

    def for_windows(self, stream: Stream, task: Task, head: EncodedSplit) -> WindowEncoder:
        assert isinstance(task, ImageTask)
        prepare = partial(encode_streamed, task, self.processor, head.arrays["pixel_values"].shape[1:])
        facts = {"processor": self.processor.fingerprint}
        packer = partial(task.packer, 0)
        return WindowEncoder(task, packer, prepare, facts, stream.features, stream.row_map, check=None)

    def save(self, folder: Path) -> None:
        self.processor.save(folder)
