"""Image classification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trainer.tasks.classes import RowClasses
from trainer.tasks.image_column import read_images, require_images
from trainer.tasks.task import ImageTask
from trainer.tasks.types import Dataset, ImageProcessor


@dataclass(frozen=True)
class ImageClassificationTask(RowClasses, ImageTask):
    """Classification of images.

    `shape` is the shape of images stored as flat lists: height, width and, for several channels, their number.
    """

    image_column: str
    label_column: str
    metric_names: tuple[str, ...]
    class_names: tuple[str, ...] | None = None
    labels_are_names: bool | None = None
    shape: tuple[int, ...] | None = None
    labelled: bool = True
    class_weights: Literal["balanced"] | Mapping[str, float] | None = None
    label_smoothing: float = 0.0
    positive: str | None = None

    auto_class_name = "AutoModelForImageClassification"
    beside_rows = ("metric_names", "class_weights", "label_smoothing", "positive")

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.image_column, self.label_column) if self.labelled else (self.image_column,)

    def check_inputs(self, features: Mapping[str, Any], where: str) -> None:
        require_images(features, self.image_column, self.shape, where)

    def encode_images(
        self, rows: Dataset, processor: ImageProcessor, where: str, first_row: int
    ) -> dict[str, list[Any]]:
        images = read_images(rows, self.image_column, self.shape, where, first_row)
        features: dict[str, list[Any]] = {"pixel_values": [processor(image) for image in images]}
        return features if not self.labelled else {**features, "labels": self.class_indices(rows, where, first_row)}
