"""The row of `TINY_TASKS` for images."""

from __future__ import annotations

import numpy as np

from tests.helpers.training import NUM_CLASSES, NUM_ROWS, TINY_VIT, TinyTask
from trainer.data.split import EncodedSplit
from trainer.features.vision.preparation import Normalisation


def tiny_images(num_rows: int = NUM_ROWS, size: int = 16) -> EncodedSplit:
    """Return random square images (uint8, one channel) with random classes, the same on every rank."""
    random = np.random.default_rng(0)
    return EncodedSplit(
        offsets=np.zeros(num_rows + 1, np.int64),
        tokens={},
        scalars={"labels": random.integers(0, NUM_CLASSES, num_rows)},
        content_hash="tiny images",
        arrays={"pixel_values": random.integers(0, 256, (num_rows, 1, size, size), np.uint8)},
    )


TASKS = {
    "image_classification": TinyTask(
        {"type": "image_classification"}, {"config": TINY_VIT}, tiny_images, Normalisation(1 / 255, (0.5,), (0.5,))
    ),
}
