"""Image splits: images are resized once, to 8 bits a channel; ranks and concurrent runs share the result."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainer.base.errors import DataError
from trainer.data.cache import EntryWriter, entry_key, open_or_write
from trainer.data.hashing import ROWS_AT_ONCE, hash_rows
from trainer.data.sources import Split
from trainer.data.split import EncodedSplit, encode_rows

if TYPE_CHECKING:
    import PIL.Image
    import pyarrow as pa
    from datasets import Dataset

_IMAGES_AT_ONCE = 100
_PIXELS = "pixel_values"
_LIBRARIES = ("transformers", "pillow", "numpy")


class ImageProcessor(Protocol):
    """The part of an image processor that this package uses."""

    @property
    def fingerprint(self) -> str:
        """A text that changes whenever the same image would become another array."""
        ...

    def __call__(self, image: PIL.Image.Image) -> NDArray[np.uint8]:
        """Return the resized image, of shape `[channels, height, width]`."""
        ...


class ImageEncoder(Protocol):
    """The part of `trainer.tasks.task.ImageTask` that this package uses."""

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def fingerprint(self) -> str: ...

    def check_columns(self, features: Mapping[str, Any], where: str) -> None: ...

    def encode_images(
        self, rows: Dataset, processor: ImageProcessor, where: str, first_row: int
    ) -> dict[str, list[Any]]: ...


def encode_images(split: Split, encoder: ImageEncoder, processor: ImageProcessor, cache: Path) -> EncodedSplit:
    """Return the split with prepared images, before normalisation; read it from the cache or write it there.

    Any number of processes may call this function at once: one prepares the split, and the others wait.

    Args:
        split: the rows.
        encoder: the resolved task.
        processor: the image processor of the model.
        cache: the folder of the cache, which is created if it is missing.

    Returns:
        A split with the column `pixel_values`, uint8 `[rows, channels, height, width]`, in its `arrays`.

    Raises:
        DataError: a column is missing, a value is not valid, or the prepared images differ in size.
        UsageError: the cache cannot be written.
    """
    encoder.check_columns(split.rows.features, split.where)
    rows = split.rows.select_columns(list(encoder.columns))
    key = entry_key(encoder, _LIBRARIES, rows=_hash_images(rows), processor=processor.fingerprint)

    def write(writer: EntryWriter) -> None:
        shape: tuple[int, ...] | None = None
        for first_row in range(0, len(rows), _IMAGES_AT_ONCE):
            batch = rows.select(range(first_row, min(first_row + _IMAGES_AT_ONCE, len(rows))))

            def encode(rows: Dataset, first_row: int) -> dict[str, list[Any]]:
                return encoder.encode_images(rows, processor, split.where, split.first_row + first_row)

            with split.names_lines():
                features = encode_rows(batch, first_row, encode)
            shape = shape or features[_PIXELS][0].shape
            _check_shapes(features[_PIXELS], shape, split.where, split.first_row + first_row)
            writer.add(features)
            if split.show is not None:
                split.show(first_row + len(batch), len(rows))

    encoded = open_or_write(cache, key, write)
    encoded.sources = split.sources
    return encoded


def _check_shapes(images: list[NDArray[np.uint8]], shape: tuple[int, ...], where: str, first_row: int) -> None:
    for row, image in enumerate(images, start=first_row + 1):
        if image.shape != shape:
            (_, height, width), (_, first_height, first_width) = image.shape, shape
            raise DataError(
                f"the images of {where} must be of one size once they are prepared, but that of row {row} is {height} x"
                f" {width} and the first is {first_height} x {first_width}; make them equal, or use a model whose"
                " configuration or image processor names a size"
            )


def _hash_images(rows: Dataset) -> str:
    """Return the hash of rows, with the content of separate image files."""
    import datasets

    columns = [
        name
        for name, feature in rows.features.items()
        if isinstance(feature, datasets.Image) or (isinstance(feature, Mapping) and {"bytes", "path"} <= feature.keys())
    ]
    if not columns:
        return hash_rows(rows)
    return hash_rows(rows, ROWS_AT_ONCE // 100, lambda batch: _with_contents(batch, columns))


def _with_contents(batch: pa.Table, columns: list[str]) -> pa.Table:
    """Return the rows with the names of image files replaced by the encoded images."""
    import pyarrow as pa

    for name in columns:
        contents = [_content(value) for value in batch[name].to_pylist()]
        batch = batch.set_column(batch.column_names.index(name), name, pa.array(contents, pa.large_binary()))
    return batch


def _content(value: Mapping[str, Any] | None) -> bytes | None:
    if value is None:
        return None
    if value["bytes"] is not None:
        return bytes(value["bytes"])
    try:
        return Path(value["path"]).read_bytes()
    except OSError:
        return None  # the reader of the image reports the error with its row
