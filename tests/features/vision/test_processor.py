"""Image processors: what a checkpoint's own says, in two halves, and what follows from a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from transformers import AutoConfig, AutoImageProcessor, ViTImageProcessorPil

from tests.helpers.training import TINY_VIT
from trainer.base.errors import UsageError
from trainer.features.vision.preparation import Normalisation
from trainer.features.vision.processor import ImageProcessor, load_image_processor
from trainer.models.configuration import load_config
from trainer.recipe.schema import Model

PHOTO = PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 41, 3), np.uint8))
SIZE = {"height": 16, "width": 16}


def both_halves(processor: ImageProcessor, image: PIL.Image.Image) -> np.ndarray:
    return Normalisation(processor.scale, processor.mean, processor.std)(torch.from_numpy(processor(image))).numpy()


def checkpoint(folder: Path, processor: Any) -> Model:
    AutoConfig.for_model(**{**TINY_VIT, "num_channels": 3}).save_pretrained(folder)
    processor.save_pretrained(folder)
    return Model(name_or_path=str(folder))


def loaded(model: Model) -> ImageProcessor:
    return load_image_processor(model, load_config(model, {}))


def described(**config: Any) -> Model:
    return Model(config={**TINY_VIT, **config})


@pytest.mark.parametrize(
    "keys",
    [
        {"size": SIZE},
        {"size": {"shortest_edge": 20}, "do_center_crop": True, "crop_size": SIZE, "resample": 3},
        {"size": SIZE, "do_normalize": False},
        {"size": SIZE, "do_rescale": False, "image_mean": [100.0] * 3, "image_std": [50.0] * 3},
    ],
    ids=["resized", "cropped", "not_normalised", "not_rescaled"],
)
def test_images_are_prepared_by_the_configuration_of_the_checkpoint(tmp_path, keys):
    own = ViTImageProcessorPil(**{"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4], **keys})
    processor = loaded(checkpoint(tmp_path, own))
    assert processor.size == (16, 16)
    pixels = processor(PHOTO)
    assert (pixels.dtype, pixels.shape) == (np.uint8, (3, 16, 16))
    expected = own(PHOTO, return_tensors="np")["pixel_values"][0]
    np.testing.assert_allclose(both_halves(processor, PHOTO), expected, atol=1e-5)


def test_random_weights_take_the_size_of_the_configuration(tmp_path):
    processor = loaded(described(image_size=[8, 12]))
    assert processor.size == (8, 12)
    assert processor(PHOTO).shape == (1, 8, 12), "colours become grey where the model reads one channel"
    white, black = (PIL.Image.new("L", (5, 5), value) for value in (255, 0))
    assert both_halves(processor, white).flatten().tolist() == [1.0] * 96
    assert both_halves(processor, black).flatten().tolist() == [-1.0] * 96
    processor.save(tmp_path)
    AutoConfig.for_model(**TINY_VIT).save_pretrained(tmp_path)
    opened = AutoImageProcessor.from_pretrained(tmp_path)
    expected = opened(PHOTO.convert("L"), return_tensors="np")["pixel_values"][0]
    np.testing.assert_allclose(both_halves(processor, PHOTO), expected, atol=1e-5)


def test_grey_images_become_colours_where_the_model_reads_three():
    processor = loaded(described(num_channels=3))
    pixels = processor(PIL.Image.new("L", (4, 4), 77))
    assert pixels.shape == (3, 16, 16)
    assert set(pixels.flatten().tolist()) == {77}
    assert processor(PIL.Image.new("RGBA", (4, 4), (1, 2, 3, 0)))[:, 0, 0].tolist() == [1, 2, 3]


def test_the_fingerprint_depends_on_all_that_changes_the_result():
    one, same = (loaded(described()).fingerprint for _ in range(2))
    others = [loaded(described(**keys)).fingerprint for keys in ({"image_size": 8}, {"num_channels": 3})]
    assert one == same
    assert len({one, *others}) == 3


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (described(num_channels=4), r"`model.config` must be a model that reads images of 1 or 3 channels.* 4; use"),
        (Model(config={"model_type": "bert"}), r"configuration of a bert has `num_channels` None"),
    ],
)
def test_a_model_of_no_images_is_refused(model, message):
    with pytest.raises(UsageError, match=message):
        loaded(model)


def test_a_processor_of_another_size_than_the_model_is_refused(tmp_path):
    model = checkpoint(tmp_path, ViTImageProcessorPil(size={"height": 32, "width": 32}))
    with pytest.raises(UsageError, match=r"must make images of \(16, 16\).*but makes \(32, 32\)"):
        loaded(model)


def test_a_checkpoint_without_a_processor_is_refused(tmp_path):
    model = checkpoint(tmp_path, ViTImageProcessorPil(size=SIZE))
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(UsageError, match=r"`model.name_or_path` is .* could not be opened"):
        loaded(model)


def test_channels_that_do_not_fit_are_refused(tmp_path):
    own = ViTImageProcessorPil(size=SIZE, image_mean=[0.5] * 2, image_std=[0.5] * 2)
    with pytest.raises(UsageError, match="normalises 2 channels"):
        loaded(checkpoint(tmp_path, own))


def test_a_size_that_depends_on_the_image_is_not_taken_as_fixed():
    class Padding(ViTImageProcessorPil):
        """Pads to multiples of 64."""

        def resize(self, image: np.ndarray, *args: Any, **kwargs: Any) -> np.ndarray:
            height, width = (-length % 64 for length in image.shape[-2:])
            return np.pad(image, [(0, 0)] * (image.ndim - 2) + [(0, height), (0, width)])

    assert ImageProcessor(Padding(size=SIZE), 3).size is None


def test_a_processor_that_does_something_else_is_refused():
    class Inverting(ViTImageProcessorPil):
        def normalize(self, image: np.ndarray, *args: Any, **kwargs: Any) -> np.ndarray:
            return -super().normalize(image, *args, **kwargs)

    with pytest.raises(UsageError, match="does not resize images first"):
        ImageProcessor(Inverting(size=SIZE), 3)
