from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from tests.helpers.tiny_run import write_tiny_image_run
from trainer.base.errors import UsageError
from trainer.data.collate import collate
from trainer.data.split import EncodedSplit
from trainer.features.vision.preparation import ImagePreparation, Normalisation
from trainer.recipe.reading.loading import load_recipe
from trainer.tasks.registry import build_task
from trainer.training.row_encoding import load_preparation


def test_images_are_prepared_by_the_image_processor(tmp_path):
    recipe = load_recipe(str(write_tiny_image_run(tmp_path))).recipe
    preparation = load_preparation(recipe)
    assert isinstance(preparation, ImagePreparation)
    assert preparation.masking(build_task(recipe.task), 0) is None
    assert preparation.batching.mean == preparation.batching.std == (0.5, 0.5, 0.5)
    assert "mean=(0.5, 0.5, 0.5)" in preparation.normalisation
    preparation.save(tmp_path / "model")
    saved = json.loads((tmp_path / "model" / "preprocessor_config.json").read_text())
    assert saved["size"] == {"height": 16, "width": 16}


def test_a_model_of_texts_has_no_image_processor(tmp_path):
    recipe = write_tiny_image_run(tmp_path, model={"config": {"model_type": "bert"}})
    with pytest.raises(UsageError, match=r"`model.config` must be a model that reads images"):
        load_preparation(load_recipe(str(recipe)).recipe)


def test_images_are_normalised_by_channel():
    images = np.arange(2 * 3 * 2 * 2, dtype=np.uint8).reshape(2, 3, 2, 2)
    split = EncodedSplit(
        np.zeros(3, np.int64), {}, {"labels": np.array([4, 5])}, "hash", arrays={"pixel_values": images}
    )
    batching = Normalisation(1 / 255, mean=(0.5, 0.4, 0.3), std=(0.1, 0.2, 0.4))
    batch = collate(split, np.array([1, 0, 1]), batching, places=np.array([7, 8, 9]))
    assert batch.inputs.keys() == {"pixel_values"}
    pixels = batch.inputs["pixel_values"]
    assert (pixels.dtype, pixels.shape) == (torch.float32, (3, 3, 2, 2))
    assert pixels[1, 2, 0, 1].item() == pytest.approx((9 / 255 - 0.3) / 0.4)
    assert batch.labels.tolist() == [5, 4, 5]
    assert images[1, 0, 0, 0] == 12, "what is kept is not changed"
