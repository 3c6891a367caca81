"""Whole runs on images."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import pipeline

from tests.helpers.tiny_run import NUM_VALIDATION_ROWS, write_tiny_image_run
from tests.training.test_run import metrics, train
from trainer.base.errors import ExitCode


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a folder of images."""
    recipe = write_tiny_image_run(tmp_path_factory.mktemp("images"))
    assert train(recipe) == ExitCode.DONE
    return recipe


class TestImages:
    def test_the_model_opens_with_transformers_and_predicts_what_was_evaluated(self, images):
        classify = pipeline("image-classification", str(images.parent / "run" / "model"))
        files = sorted((images.parent / "images" / "validation").rglob("*.png"))
        right = sum(classify(str(file), top_k=1)[0]["label"] == file.parent.name for file in files)
        assert len(files) == NUM_VALIDATION_ROWS
        assert right / len(files) == metrics(images).evaluations[-1].metrics["accuracy"]

    def test_rows_without_tokens_have_no_rate_of_tokens(self, images):
        record = metrics(images).steps[-1]
        assert (record.samples, record.tokens, record.tokens_per_second) == (64, None, None)

    def test_pretrained_weights_with_their_image_processor_go_on(self, images, tmp_path):
        model = {"name_or_path": str(images.parent / "run" / "model"), "config": None}
        recipe = write_tiny_image_run(tmp_path, model=model)
        assert train(recipe, "training.max_steps=2", "optimizer.learning_rate=1e-9") == ExitCode.DONE
        (only,) = metrics(recipe).evaluations
        before = metrics(images).evaluations[-1].metrics
        assert only.metrics["loss"] == pytest.approx(before["loss"], rel=1e-4)
