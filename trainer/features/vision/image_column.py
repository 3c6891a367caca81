"""Reader of image columns: encoded images, which Pillow decodes, or nested lists of values; 8 bits a channel."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
from PIL.Image import Image

from trainer.base.errors import DataError
from trainer.tasks.text.columns import cell, require_columns, type_name
from trainer.tasks.types import Dataset

_ENCODED = ("binary", "large_binary", "string", "large_string")  # texts name files
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # modes of Pillow by number of channels
_DEEP_MODES = ("I", "F")  # modes with more than 8 bits a channel, which Pillow would truncate


def require_images(features: Mapping[str, Any], name: str, shape: tuple[int, ...] | None, where: str) -> None:
    """Require that column `name` holds images, and that `shape` is given for flat lists only."""
    require_columns(features, [name], "task.image", where)
    depth = None if _is_encoded(features[name]) else _depth(features[name])
    holds = f"column `{name}` of {where} holds {type_name(features[name])}"
    if depth is not None and not 1 <= depth <= 3:
        raise DataError(
            "`task.image` must name a column of encoded images, of names of their files, or of integers from 0 to 255"
            f" as lists [height][width] or [height][width][channels], but {holds}"
        )
    if depth == 1 and shape is None:
        raise DataError(
            f"`task.shape` must be the height and the width of flat lists, but is null, and {holds}; set it"
        )
    if depth != 1 and shape is not None:
        raise DataError(f"`task.shape` is of images that are flat lists, but {holds}; remove it")


def read_images(rows: Dataset, name: str, shape: tuple[int, ...] | None, where: str, first_row: int) -> Iterator[Image]:
    """Yield the images of column `name`, rotated by their EXIF orientation.

    Encoded images are bytes here, perhaps beside a path; the caller has read the files that rows name.

    Raises:
        DataError: a value is null or not an image; the message names the row.
    """
    for place, value in enumerate(rows[name]):
        path = None
        if isinstance(value, Mapping):
            value, path = value["bytes"], value["path"]
        if value is None:
            raise DataError(f"{cell(name, first_row + place, where)} is null; every row needs an image")
        try:
            image = _from_lists(value, shape) if isinstance(value, list) else _decode(value)
        except _NotAnImageError as error:
            named = cell(name, first_row + place, where) + (f", file `{path}`," if path else "")
            raise DataError(f"{named} must be an image, but {error}") from error
        yield image


class _NotAnImageError(Exception):
    """Error of a value that is not an image; the message gives the reason."""


def _is_encoded(feature: Any) -> bool:
    if isinstance(feature, Mapping):  # the form in which `datasets` writes images to Parquet files
        return "bytes" in feature and (_is_encoded(feature["bytes"]) or _names_files(feature))
    return type(feature).__name__ == "Image" or getattr(feature, "dtype", None) in _ENCODED


def _names_files(feature: Mapping[str, Any]) -> bool:
    """Return whether all images are files that rows name, so that the column of bytes has no type."""
    types = [getattr(feature.get(name), "dtype", None) for name in ("bytes", "path")]
    return types == ["null", "string"]


def _depth(feature: Any) -> int:
    """Return the nesting depth of lists of integers, or a negative number for other types."""
    if type(feature).__name__.startswith("Array"):  # Array2D, Array3D
        return len(feature.shape) if _is_integer(feature) else -1
    if (inner := getattr(feature, "feature", None)) is not None:
        depth = _depth(inner)
        return depth + 1 if depth >= 0 else depth
    return 0 if _is_integer(feature) else -1


def _is_integer(feature: Any) -> bool:
    return str(getattr(feature, "dtype", "")).startswith(("int", "uint"))


def _decode(value: bytes) -> Image:
    """Decode an image from its bytes; this never opens a file that a row names."""
    try:
        with PIL.Image.open(io.BytesIO(value)) as opened:
            image = PIL.ImageOps.exif_transpose(opened)
            # Pillow decodes when it is asked for pixels; errors of the file must come here.
            image.load()
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        reason = str(error).partition(" <_io.")[0]  # the buffer has no meaning for the user
        raise _NotAnImageError(f"Pillow cannot read it: {reason}") from error
    if image.mode.partition(";")[0] in _DEEP_MODES:
        raise _NotAnImageError(f"has more than 8 bits a channel (Pillow's mode {image.mode}); convert it")
    return image


def _from_lists(value: list[Any], shape: tuple[int, ...] | None) -> Image:
    try:
        numbers = np.array(value)
    except ValueError:
        raise _NotAnImageError("its lists differ in length") from None
    if numbers.dtype.kind not in "iu" or not numbers.size:
        raise _NotAnImageError("it is not lists of integers, equally long")
    if shape is not None:
        if numbers.size != prod(shape):
            raise _NotAnImageError(f"has {numbers.size} values, not the {prod(shape)} of `task.shape`")
        numbers = numbers.reshape(shape)
    if numbers.min() < 0 or numbers.max() > 255:
        raise _NotAnImageError(f"holds {numbers.min() if numbers.min() < 0 else numbers.max()}; values are 0 to 255")
    channels = numbers.shape[2] if numbers.ndim == 3 else 1
    if channels not in _MODES:
        raise _NotAnImageError(f"has {channels} channels; there may be 1, 3 (RGB) or 4 (RGBA)")
    pixels = numbers.astype(np.uint8)
    # Pillow has no mode of one channel with three dimensions.
    return PIL.Image.fromarray(pixels[:, :, 0] if pixels.ndim == 3 and channels == 1 else pixels)
