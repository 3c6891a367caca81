"""The section `task` of images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from trainer.recipe.schema.fields import Name
from trainer.recipe.schema.section import Contradiction, shared
from trainer.recipe.schema.task_keys import ClassificationKeys, OtherInputs, Start, TaskKeys, Traits


class ImageKeys(TaskKeys):
    """Keys that all tasks on images share."""

    other_inputs = OtherInputs(
        name="pixel_values",
        part="image processor",
        files=("preprocessor_config.json", "processor_config.json"),
        most_checked=200,
        preparation="trainer.features.vision.preparation:load_preparation",
        samples="trainer.features.vision.samples:ImageSamples",
    )
    type: str
    image: Name = "image"
    """Column of the image: encoded (PNG, JPEG, ...), the name of such a file, or values from 0 to 255 as lists
    [height][width] or [height][width][channels]."""
    shape: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=2, max_length=3)] | None = None
    """Height, width and, if there are several, channels of images that are flat lists."""

    def contradictions(self) -> Iterator[Contradiction]:
        yield from super().contradictions()
        yield from shared({"image": self.image, "label": getattr(self, "label", None)})


class ImageClassification(ClassificationKeys, ImageKeys):
    """Assign each image to one of several classes."""

    implementation = "trainer.features.vision.image_classification:ImageClassificationTask"
    type: Literal["image_classification"]
    traits = Traits(streams=True, teacher=True)
    start = Start("vit_sample", "google/vit-base-patch16-224-in21k", 5e-5)
