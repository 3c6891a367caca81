"""Tasks on images: their interface, and image classification."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.features.vision.image_column import read_images, require_images
from trainer.features.vision.processor import ImageProcessor
from trainer.tasks.classes import RowClasses
from trainer.tasks.exported import Card
from trainer.tasks.preview import RowPreview
from trainer.tasks.task import Task
from trainer.tasks.types import Dataset, Encoded


class ImageTask(Task):
    """A task on images.

    Attributes:
        image_column: the column of images; texts there name files.
    """

    image_column: str

    @abstractmethod
    def encode_images(self, rows: Dataset, processor: ImageProcessor, where: str, first_row: int) -> Encoded:
        """Read the images of rows and convert their labels to numbers.

        Args:
            rows: consecutive rows of a split that passed `check_columns`.
            first_row: the index of `rows[0]` in the split, from 0; messages count from 1.

        Returns:
            `pixel_values`: one uint8 array `[channels, height, width]` for each row. `labels`: one number for each row.

        Raises:
            DataError: a value is not valid; the message names the column, the row and the value.
        """


@dataclass(frozen=True)
class ImageClassificationTask(RowClasses, ImageTask):
    """Classification of images.

    `shape` is the shape of images stored as flat lists: height, width and, for several channels, their number.
    """

    image_column: str
    label_column: str
    metric_names: tuple[str, ...]
    shape: tuple[int, ...] | None = None

    auto_class_name = "AutoModelForImageClassification"
    card = Card("image-classification", processor="AutoImageProcessor", rows="[image]")

    @property
    def preview(self) -> RowPreview:
        return RowPreview(dict(enumerate(self.class_names or ())), roles=("image",))

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.image_column, self.label_column) if self.labelled else (self.image_column,)

    def check_inputs(self, features: Mapping[str, Any], where: str) -> None:
        require_images(features, self.image_column, self.shape, where)

    def encode_images(self, rows: Dataset, processor: ImageProcessor, where: str, first_row: int) -> Encoded:
        images = read_images(rows, self.image_column, self.shape, where, first_row)
        features: Encoded = {"pixel_values": [processor(image) for image in images]}
        return features if not self.labelled else {**features, "labels": self.class_indices(rows, where, first_row)}
