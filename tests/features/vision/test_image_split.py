from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import PIL.Image
import pyarrow.parquet
import pytest

from trainer.base.errors import DataError
from trainer.data import readers
from trainer.data.sources import Split, load_splits
from trainer.features.vision.image_classification import ImageClassificationTask
from trainer.features.vision.image_split import ImageRows, encode_images
from trainer.recipe.schema import FileData, FolderData, HubData

TASK = ImageClassificationTask("image", "label", ("accuracy",), class_names=("no", "yes"), labels_are_names=True)


class Processor:
    """Counts what it is asked for."""

    fingerprint = "grey"

    def __init__(self):
        self.calls = 0

    def __call__(self, image):
        self.calls += 1
        return np.asarray(image.convert("L"))[None]


def split_of(images):
    rows = {"image": [image.tolist() for image in images], "label": ["no", "yes"] * (len(images) // 2)}
    return Split(datasets.Dataset.from_dict(rows), "`some.jsonl`")


def images_of(number, size=(4, 5)):
    return np.random.default_rng(0).integers(0, 256, (number, *size), np.uint8)


@pytest.fixture
def folder(tmp_path) -> Path:
    """As `datasets` reads folders of images: one for each split and, in it, for each class."""
    for split in ("train", "validation"):
        for name, value in (("dark", 10), ("light", 250)):
            (tmp_path / split / name).mkdir(parents=True)
            for index in range(2):
                pixels = np.full((4, 5), value + index, np.uint8)
                PIL.Image.fromarray(pixels).save(tmp_path / split / name / f"{index}.png")
    return tmp_path


def encode_folder(folder, cache):
    train = load_splits(HubData(source="hub", name=str(folder))).train
    task = replace(TASK, class_names=None, labels_are_names=None).resolve(train.rows, train.where)
    processor = Processor()
    return encode_images(train, task, processor, cache), processor.calls, task


def test_encoded_images_differ_from_the_inputs_by_normalisation_only(tmp_path):
    images = images_of(250)
    split = encode_images(split_of(images), TASK, Processor(), tmp_path)
    assert split.arrays["pixel_values"].dtype == np.uint8
    np.testing.assert_array_equal(split.arrays["pixel_values"], images[:, None])
    assert split.scalars["labels"].tolist() == [0, 1] * 125
    assert (len(split), split.lengths.sum(), split.num_cut) == (250, 0, 0)


def test_the_second_time_nothing_is_prepared(tmp_path):
    processor = Processor()
    first = encode_images(split_of(images_of(4)), TASK, processor, tmp_path)
    again = encode_images(split_of(images_of(4)), TASK, processor, tmp_path)
    assert processor.calls == 4
    assert again.content_hash == first.content_hash
    processor.fingerprint = "another"
    encode_images(split_of(images_of(4)), TASK, processor, tmp_path)
    assert processor.calls == 8


def test_a_folder_of_images_has_its_folders_as_classes(folder, tmp_path):
    split, calls, task = encode_folder(folder, tmp_path / "cache")
    assert task.model_options()["id2label"] == {0: "dark", 1: "light"}
    assert split.arrays["pixel_values"][:, 0, 0, 0].tolist() == [10, 11, 250, 251]
    assert split.scalars["labels"].tolist() == [0, 0, 1, 1]
    assert calls == 4


def test_an_image_that_is_edited_in_place_is_read_again(folder, tmp_path):
    assert encode_folder(folder, tmp_path / "cache")[1] == 4
    assert encode_folder(folder, tmp_path / "cache")[1] == 0
    PIL.Image.fromarray(np.full((4, 5), 99, np.uint8)).save(folder / "train" / "dark" / "0.png")
    split, calls, _ = encode_folder(folder, tmp_path / "cache")
    assert calls == 4
    assert split.arrays["pixel_values"][0, 0, 0, 0] == 99


def test_images_of_several_sizes_are_refused(tmp_path):
    images = [*images_of(120), images_of(1, (4, 6))[0], images_of(1)[0]]
    with pytest.raises(DataError, match=r"must be of one size .* row 121 is 4 x 6 and the first is 4 x 5"):
        encode_images(split_of(images), TASK, Processor(), tmp_path)


PLAIN = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}


def png(value: int) -> bytes:
    file = io.BytesIO()
    PIL.Image.new("L", (3, 2), value).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def beside(tmp_path) -> Path:
    """A folder for rows and images; there is an image outside of it."""
    inside = tmp_path / "data" / "deep" / "inside.png"
    inside.parent.mkdir(parents=True)
    inside.write_bytes(png(10))
    (tmp_path / "outside.png").write_bytes(png(99))
    (tmp_path / "data" / "link.png").symlink_to(tmp_path / "outside.png")
    (tmp_path / "data" / "deep" / "link.png").symlink_to(inside)
    os.mkfifo(tmp_path / "data" / "pipe.png")
    return tmp_path / "data"


def written(folder, images, form, source="files"):
    """Write rows as a stranger may, who need not put the bytes of images into them."""
    features = datasets.Features({"image": PLAIN, "label": datasets.Value("string")})
    rows = datasets.Dataset.from_dict({"image": images, "label": ["no", "yes"] * (len(images) // 2)}, features)
    if source == "folder":
        datasets.DatasetDict(train=rows).save_to_disk(folder / "saved")
        return FolderData(source="folder", path=str(folder / "saved"), validation="train")
    table = rows.with_format("arrow")[:]
    schema = datasets.Features({**features, "image": form}).arrow_schema
    pyarrow.parquet.write_table(table.replace_schema_metadata(schema.metadata), folder / "train.parquet")
    if source == "hub":
        return HubData(source="hub", name=str(folder), validation="train")
    return FileData(source="files", train=str(folder / "train.parquet"))


def grey_values(data, cache, most_rows=None):
    split = load_splits(data, most_rows=most_rows).train
    return encode_images(split, TASK, Processor(), cache).arrays["pixel_values"][:, 0, 0, 0].tolist()


@pytest.mark.parametrize("form", [datasets.Image(), PLAIN], ids=["image", "mapping"])
@pytest.mark.parametrize("most_rows", [None, 4])
def test_images_beside_the_rows_are_read(beside, tmp_path, monkeypatch, form, most_rows):
    monkeypatch.setattr(readers, "_LARGE_BYTES", 0)  # a large file is read in part
    images = [
        {"bytes": None, "path": "deep/inside.png"},
        {"bytes": None, "path": str(beside / "deep" / "link.png")},
        {"bytes": png(40), "path": None},
        {"bytes": png(50), "path": str(tmp_path / "outside.png")},  # a name alone
    ]
    assert grey_values(written(beside, images, form), tmp_path / "cache", most_rows) == [10, 10, 40, 50]


def test_texts_name_images_and_a_bad_one_is_named(beside, tmp_path):
    file = beside / "train.csv"
    file.write_text(f"image,label\ndeep/inside.png,no\n{beside}/deep/link.png,yes\n")
    data = FileData(source="files", train=str(file))
    assert grey_values(data, tmp_path / "cache") == [10, 10]
    (beside / "deep" / "inside.png").write_bytes(png(10)[:12])
    with pytest.raises(DataError) as error:
        grey_values(data, tmp_path / "cache")
    assert "row 1 (line 2) of " in str(error.value)
    assert ", file `deep/inside.png`, must be an image, but Pillow cannot read it: cannot identify" in str(error.value)
    assert "object at" not in str(error.value)


@pytest.mark.parametrize("source", ["files", "hub", "folder"])
@pytest.mark.parametrize("path", ["{}/../outside.png", "../../outside.png", "{}/link.png", "/etc/passwd"])
def test_an_image_outside_of_the_data_is_refused(beside, tmp_path, path, source):
    images = [{"bytes": png(40), "path": None}, {"bytes": None, "path": path.format(beside)}]
    data = written(beside, images, datasets.Image(), source)
    with pytest.raises(DataError) as error:
        grey_values(data, tmp_path / "cache")
    assert "column `image`, row 2 of " in str(error.value)
    assert f"names the file `{path.format(beside)}`, which is outside of `" in str(error.value)
    assert "; correct the path, or write the bytes of the image into the row" in str(error.value)


def test_rows_of_text_files_may_name_images(beside, tmp_path):
    rows = [{"image": {"bytes": None, "path": "deep/inside.png"}, "label": label} for label in ("no", "yes")]
    (beside / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = FileData(source="files", train=str(beside / "train.jsonl"))
    assert grey_values(data, tmp_path / "cache") == [10, 10]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("pipe.png", "is a pipe or a device in `"),
        ("deep", "is a folder in `"),
        ("https://a.org/1.png", "does not exist in `"),
        ("loop.png", "does not exist in `"),
        ("a\0.png", "has a null character in its name;"),
        ("text " * 99, "cannot be read: File name too long;"),
    ],
)
def test_a_name_of_no_file_is_no_image(beside, tmp_path, path, problem):
    (beside / "loop.png").symlink_to("loop.png")
    data = written(beside, [{"bytes": None, "path": path}] * 2, PLAIN)
    with pytest.raises(DataError) as error:
        grey_values(data, tmp_path / "cache")
    assert f"names the file `{path:.200}`, which {problem}" in str(error.value)


def test_without_folders_no_file_is_read_that_a_row_names():
    rows = datasets.Dataset.from_dict({"image": ["1.png"], "label": ["no"]})
    with pytest.raises(DataError, match=r"names the file `1.png`, which is not read, because .*the bytes"):
        ImageRows(TASK, Processor())(rows, "`some.jsonl`", 0)


def test_an_empty_name_is_no_image(beside, tmp_path):
    data = written(beside, [{"bytes": None, "path": ""}] * 2, PLAIN)
    with pytest.raises(DataError, match=r"row 1 of .* is null; every row needs an image"):
        grey_values(data, tmp_path / "cache")
