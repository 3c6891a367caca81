"""The keys of prepared images: each part of the task or of the image processor has a new key, or equal rows."""

from __future__ import annotations

import copy

import datasets
import PIL.Image
import pytest
from transformers import ViTImageProcessorPil

from tests.data.test_keys import (
    Outcomes,
    assert_fields_are_known,
    assert_the_version_is_known,
    others,
    resolved,
    split_of,
)
from trainer.data.sources import Split
from trainer.features.vision.image_split import encode_images
from trainer.features.vision.processor import ImageProcessor
from trainer.features.vision.section import ImageClassification


@pytest.fixture
def outcomes(tmp_path):
    return Outcomes(tmp_path)


def images_task():
    return resolved(ImageClassification(type="image_classification", image="image"))


def test_each_field_of_the_task(tmp_path):
    split = split_of("image", "label")
    processor = ImageProcessor(ViTImageProcessorPil(size={"height": 4, "width": 4}), 3)
    assert_fields_are_known(
        tmp_path, images_task(), lambda task: lambda folder: encode_images(split, task, processor, folder)
    )


def test_the_version_of_the_library(monkeypatch):
    assert_the_version_is_known(monkeypatch, images_task(), "pillow")


def test_each_attribute_of_an_image_processor(outcomes):
    task, split = images_task(), split_of("image", "label")
    own = ViTImageProcessorPil(
        size={"height": 4, "width": 4}, do_center_crop=False, crop_size={"height": 3, "width": 3}
    )

    def prepare(processor):
        return lambda folder: encode_images(split, task, ImageProcessor(processor, 3), folder)

    assert outcomes.same(prepare(own))
    for attribute, value in vars(own).items():
        size = [{"height": 5, "width": 3}] if "size" in attribute else []
        resampling = [0, 3] if attribute == "resample" else []
        for other in [*others(value), *size, *resampling]:
            changed = copy.deepcopy(own)
            setattr(changed, attribute, other)
            assert outcomes.same(prepare(changed)), (attribute, other)
    assert len(outcomes.seen) > 3


def test_an_image_file_that_a_row_names_is_known_by_its_content(tmp_path, outcomes):
    processor = ImageProcessor(ViTImageProcessorPil(size={"height": 4, "width": 4}), 3)
    rows = {"image": [{"bytes": None, "path": str(tmp_path / "a.png")}] * 2, "label": ["no", "yes"]}
    encoded = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    features = datasets.Features({"image": encoded, "label": datasets.Value("string")})
    split = Split(datasets.Dataset.from_dict(rows, features), "`rows.jsonl`", folders=(tmp_path,))
    for value in (10, 200):
        PIL.Image.new("RGB", (5, 5), (value,) * 3).save(tmp_path / "a.png")
        assert outcomes.same(lambda folder: encode_images(split, images_task(), processor, folder))
    assert len(outcomes.seen) == 2
