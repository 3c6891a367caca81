"""The columns of images, for `trainer init`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from trainer.features import Columns


def of_images(columns: Columns) -> Iterator[tuple[dict[str, Any], str, None, Sequence[Any]]]:
    """Yield the section `task`, the reason for it, and further columns that may hold the label."""
    image = next((column for column in columns.all if column.kind == "image"), None)
    labels = columns.labels()
    if image is not None and labels:
        task = {"type": "image_classification", "image": image.name, "label": labels[0].name}
        yield task, f"`{image.name}` holds images", None, labels[1:]
