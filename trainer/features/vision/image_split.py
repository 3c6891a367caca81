"""Image splits: images are resized once, to 8 bits a channel; ranks and concurrent runs share the result."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trainer.base.disk import no_file, read_plain
from trainer.base.errors import DataError
from trainer.data.cache import EntryWriter, entry_key, open_or_write
from trainer.data.encoding import write_split
from trainer.data.hashing import ROWS_AT_ONCE, hash_rows
from trainer.data.sources import Split
from trainer.data.split import Encoded, EncodedSplit
from trainer.features.vision.image_classification import ImageTask
from trainer.features.vision.processor import ImageProcessor

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

_IMAGES_AT_ONCE = 100
_PIXELS = "pixel_values"


def encode_images(split: Split, task: ImageTask, processor: ImageProcessor, cache: Path) -> EncodedSplit:
    """Return the split with prepared images, before normalisation; read it from the cache or write it there.

    Any number of processes may call this function at once: one prepares the split, and the others wait.

    Returns:
        A split with the column `pixel_values`, uint8 `[rows, channels, height, width]`, in its `arrays`.

    Raises:
        DataError: a column is missing, a value is not valid or names a file outside of the folders of the data, or the
            prepared images differ in size.
        UsageError: the cache cannot be written.
    """
    task.check_columns(split.rows.features, split.where)
    rows = split.rows.select_columns(list(task.columns))
    columns = _columns_with_paths(rows, task)
    # The content of image files is a part of the key: a file may change under its name.
    key = entry_key(task, rows=_hash_images(rows, columns, split.folders), processor=processor.fingerprint)
    encode_rows = ImageRows(task, processor, split.folders)

    def encode(rows: Dataset, first_row: int) -> Encoded:
        return encode_rows(rows, split.where, split.first_row + first_row)

    def write(writer: EntryWriter) -> None:
        write_split(writer, split, rows, encode, _IMAGES_AT_ONCE)

    return replace(open_or_write(cache, key, write), sources=split.sources)


@dataclass
class ImageRows:
    """The encoding of rows of images, which must have one shape once they are prepared.

    Attributes:
        folders: the folders in which rows may name files; empty: rows must hold the bytes of their images.
        shape: `[channels, height, width]`; None: that of the first image.
    """

    task: ImageTask
    processor: ImageProcessor
    folders: Sequence[Path] = ()
    shape: tuple[int, ...] | None = None

    def __call__(self, rows: Dataset, where: str, first_row: int) -> Encoded:
        """Return prepared rows.

        Raises:
            DataError: a value is not valid, names no such file, or has another shape.
        """
        images = _with_images(rows, _columns_with_paths(rows, self.task), self.folders, where, first_row)
        features = self.task.encode_images(images, self.processor, where, first_row)
        self.shape = self.shape or features[_PIXELS][0].shape
        _require_shapes(features[_PIXELS], self.shape, where, first_row)
        return features


def _require_shapes(images: list[NDArray[np.uint8]], shape: tuple[int, ...], where: str, first_row: int) -> None:
    for row, image in enumerate(images, start=first_row + 1):
        if image.shape != shape:
            (_, height, width), (_, first_height, first_width) = image.shape, shape
            raise DataError(
                f"the images of {where} must be of one size once they are prepared, but that of row {row} is {height} x"
                f" {width} and the first is {first_height} x {first_width}; make them equal, or use a model with a"
                " size in its configuration or image processor"
            )


def _hash_images(rows: Dataset, columns: Sequence[str], folders: Sequence[Path]) -> str:
    """Return the hash of rows, with the content of the image files that `columns` name."""
    if not columns:
        return hash_rows(rows)

    def content(place: int, name: str, value: Any) -> bytes | None:
        with suppress(OSError, ValueError):  # the reader of the row reports the error
            return _content(value, folders)
        return None

    return hash_rows(rows, ROWS_AT_ONCE // 100, lambda batch: _with_contents(batch, columns, content))


def _columns_with_paths(rows: Dataset, task: ImageTask) -> list[str]:
    import datasets

    def is_path(name: str, feature: Any) -> bool:
        return name == task.image_column and getattr(feature, "dtype", None) in ("string", "large_string")

    return [
        name
        for name, feature in rows.features.items()
        if isinstance(feature, datasets.Image)
        or (isinstance(feature, Mapping) and "bytes" in feature)
        or is_path(name, feature)
    ]


def _with_contents(
    batch: pa.Table, columns: Sequence[str], content: Callable[[int, str, Any], bytes | None]
) -> pa.Table:
    """Return the rows with the values of image columns replaced by the encoded images.

    Args:
        content: returns the encoded image of an index in the batch, a column and a value.
    """
    import pyarrow as pa

    for name in columns:
        contents = [content(place, name, value) for place, value in enumerate(batch[name].to_pylist())]
        batch = batch.set_column(batch.column_names.index(name), name, pa.array(contents, pa.large_binary()))
    return batch


def _with_images(rows: Dataset, columns: Sequence[str], folders: Sequence[Path], where: str, first_row: int) -> Dataset:
    """Return rows that hold their encoded images beside their paths; `datasets` would open any file that a row names.

    Raises:
        DataError: a row names a file outside of `folders`, or one that cannot be read.
    """
    import datasets
    import pyarrow as pa

    if not columns:
        return rows

    def content(place: int, name: str, value: Any) -> bytes | None:
        try:
            return _content(value, folders)
        except (OSError, ValueError) as error:
            problem = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
            raise DataError(
                f"column `{name}`, row {first_row + place + 1} of {where} must be an image, but names the file"
                f" `{_path(value):.200}`, which {problem}; correct the path, or write the bytes of the image"
                " into the row"
            ) from error

    before = rows.with_format("arrow")[:]
    # Bytes in the rows keep `datasets` from opening files by itself.
    table = _with_contents(before, columns, content).replace_schema_metadata(None)
    for name in columns:
        paths = pa.array(map(_path, before[name].to_pylist()), pa.string())
        images = pa.StructArray.from_arrays([table[name].combine_chunks(), paths], ["bytes", "path"])
        table = table.set_column(table.column_names.index(name), name, images)
    form = {"bytes": datasets.Value("large_binary"), "path": datasets.Value("string")}
    features = datasets.Features({**rows.features, **dict.fromkeys(columns, form)})
    return datasets.Dataset(table, info=datasets.DatasetInfo(features=features))


def _content(value: Mapping[str, Any] | str | None, folders: Sequence[Path]) -> bytes | None:
    """Return an encoded image, from its bytes or from the file that it names; None: it has neither.

    Raises:
        OSError: the file cannot be read.
        ValueError: there is no such file in the folders; links count by their targets.
    """
    if isinstance(value, Mapping) and value["bytes"] is not None:
        return bytes(value["bytes"])
    path = _path(value)
    if path is None:
        return None
    if not folders:
        raise ValueError("is not read, because these rows must hold their images")
    if "\0" in path:
        raise ValueError("has a null character in its name")
    found = [Path(os.path.realpath(folder / path)) for folder in folders]  # `Path.resolve` refuses a loop of links
    # A row must not read files elsewhere, such as /etc/passwd, by ".." or by a link.
    inside = [file for file, folder in zip(found, folders, strict=True) if file.is_relative_to(folder.resolve())]
    places = ", ".join(f"`{folder}`" for folder in folders)
    if not inside:
        raise ValueError(f"is outside of {places}")
    file = next((file for file in inside if file.is_file()), inside[0])
    if not file.is_file():
        raise ValueError(f"{no_file(file)} in {places}")
    return read_plain(file)


def _path(value: Mapping[str, Any] | str | None) -> str | None:
    """Return the name of the file of an image; None: it has none."""
    return (value.get("path") if isinstance(value, Mapping) else value) or None
