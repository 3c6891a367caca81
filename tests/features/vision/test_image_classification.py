from __future__ import annotations

import io

import datasets
import numpy as np
import PIL.Image
import pytest

from trainer.base.errors import DataError
from trainer.features.vision.section import ImageClassification
from trainer.tasks.registry import build_task

WHERE = "`rows.parquet`"
GREY = np.arange(6, dtype=np.uint8).reshape(2, 3) * 50
COLOUR = np.arange(18, dtype=np.uint8).reshape(2, 3, 3) * 14


def task_of(**keys):
    return build_task(ImageClassification(type="image_classification", **keys))


def png(pixels, **options):
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "png", **options)
    return file.getvalue()


def rows_of(images, features=None):
    rows = datasets.Dataset.from_dict({"image": images, "label": ["a", "b"][: len(images)]})
    return rows.cast_column("image", features) if features is not None else rows


def as_it_is(image):
    return np.asarray(image)


def pixels_of(rows, **keys):
    task = task_of(labels=["a", "b"], **keys).resolve(rows, WHERE)
    return task.encode_images(rows, as_it_is, WHERE, 0)["pixel_values"]


def test_encoded_images_are_read():
    one, two = pixels_of(rows_of([png(GREY), png(COLOUR)]))
    np.testing.assert_array_equal(one, GREY)
    np.testing.assert_array_equal(two, COLOUR)


def test_lists_are_read():
    for values, keys in (
        (COLOUR.tolist(), {}),
        (COLOUR.ravel().tolist(), {"shape": [2, 3, 3]}),
    ):
        np.testing.assert_array_equal(pixels_of(rows_of([values, values]), **keys)[1], COLOUR)
    for values, keys in (
        (GREY.tolist(), {}),
        (GREY[:, :, None].tolist(), {}),
        (GREY.ravel().tolist(), {"shape": [2, 3]}),
    ):
        np.testing.assert_array_equal(pixels_of(rows_of([values, values]), **keys)[0], GREY)
    array = datasets.Array2D((2, 3), "uint8")
    np.testing.assert_array_equal(pixels_of(rows_of([GREY, GREY], array))[0], GREY)


def test_images_are_rotated_by_their_exif_orientation(tmp_path):
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # turned a quarter
    (turned, *_) = pixels_of(rows_of([png(GREY, exif=exif), png(GREY)]))
    np.testing.assert_array_equal(turned, np.rot90(GREY, -1))


def test_labels_equal_other_classification_tasks():
    rows = datasets.Dataset.from_dict({"image": [GREY.tolist()] * 3, "label": ["b", "a", "b"]})
    task = task_of().resolve(rows, WHERE)
    assert task.model_options()["id2label"] == {0: "a", 1: "b"}
    assert task.encode_images(rows, as_it_is, WHERE, 0)["labels"] == [1, 0, 1]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"no image", "must be an image, but Pillow cannot read it: cannot identify image file"),
        (None, "is null; every row needs an image"),
        (png(np.zeros((2, 2), np.uint16)), "has more than 8 bits a channel (Pillow's mode I;16); convert it"),
        ([[1, 2], [3]], "must be an image, but its lists differ in length"),
        ([[0, 256]], "must be an image, but holds 256; values are 0 to 255"),
        ([[0, -1]], "must be an image, but holds -1; values are 0 to 255"),
        ([[[0, 1]]], "must be an image, but has 2 channels; there may be 1, 3 (RGB) or 4 (RGBA)"),
        ([[None, 1]], "must be an image, but it is not lists of integers"),
    ],
)
def test_values_without_an_image_are_refused_with_their_row(value, message):
    whole = png(GREY) if not isinstance(value, list) else [[[0]]] if isinstance(value[0][0], list) else [[0]]
    rows = rows_of([whole, value])
    with pytest.raises(DataError) as error:
        task_of(labels=["a", "b"]).encode_images(rows, as_it_is, WHERE, first_row=10)
    assert "column `image`, row 12 of `rows.parquet`" in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("value", "keys", "message"),
    [
        (0.5, {}, "`task.image` must name a column of encoded images.*holds float"),
        ([0.5], {}, "`task.image` must name a column of encoded images.*holds List"),
        ([[[[1]]]], {}, "`task.image` must name a column of encoded images"),
        ([1, 2], {}, "`task.shape` must be the height and the width of flat lists, but is null"),
        ([[1, 2]], {"shape": [1, 2]}, "`task.shape` is of images that are flat lists.*remove it"),
        ([1, 2], {"image": "picture"}, "`task.image` names the column `picture`.*its columns are `image`, `label`"),
    ],
)
def test_a_column_that_holds_no_images_is_refused(value, keys, message):
    with pytest.raises(DataError, match=message):
        task_of(**keys).check_columns(rows_of([value, value]).features, WHERE)


def test_a_flat_list_of_another_length_is_refused():
    with pytest.raises(DataError, match=r"row 2 of .* has 3 values, not the 4 of `task.shape`"):
        pixels_of(rows_of([[1, 2, 3, 4], [1, 2, 3]]), shape=[2, 2])
