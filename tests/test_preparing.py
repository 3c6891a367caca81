from __future__ import annotations

import json

import pytest

from tests.helpers.tiny_run import write_tiny_image_run, write_tiny_run
from trainer.errors import UsageError
from trainer.preparing import ImagePreparation, TextPreparation, load_preparation
from trainer.recipe.loading import load_recipe
from trainer.tasks.masking import Masking
from trainer.tasks.registry import build_task

MASKED_LM = {"type": "masked_lm", "text": "text", "metrics": ["accuracy"]}


def test_texts_are_prepared_by_the_tokenizer(tmp_path):
    recipe = load_recipe(str(write_tiny_run(tmp_path))).recipe
    preparation = load_preparation(recipe)
    assert isinstance(preparation, TextPreparation)
    assert (preparation.max_length, preparation.normalisation) == (16, None)
    assert preparation.masking(build_task(recipe.task), 0) is None, "prepared rows have labels"
    preparation.save(tmp_path / "model")
    assert (tmp_path / "model" / "tokenizer.json").exists()


def test_tokens_are_hidden_by_the_tokenizers_mask(tmp_path):
    recipe = load_recipe(str(write_tiny_run(tmp_path, task=MASKED_LM))).recipe
    preparation = load_preparation(recipe)
    masking = preparation.masking(build_task(recipe.task), 7)
    assert isinstance(masking, Masking)
    assert (masking.mask_token, masking.seed) == (preparation.tokenizer.mask_token_id, 7)


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
