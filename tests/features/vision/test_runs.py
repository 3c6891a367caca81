"""Whole runs on images, their previews, predictions and exported folders."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow.parquet
import pytest
from PIL import Image
from transformers import pipeline

from tests.helpers.tiny_run import NUM_VALIDATION_ROWS, write_tiny_image_run
from tests.tools.certify.test_verifying import answered_here, assert_certified
from tests.tools.predict.test_predicting_tasks import STEPS, check_classes, evaluated, shown
from tests.tools.test_preview import assert_previewed
from tests.training.test_run import metrics, train
from trainer.base.errors import ExitCode
from trainer.cli import main
from trainer.tools.certify import verifying


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a folder of images."""
    recipe = write_tiny_image_run(tmp_path_factory.mktemp("images"))
    assert train(recipe) == ExitCode.DONE
    return recipe


class TestImages:
    def test_the_model_opens_with_transformers_and_repeats_the_evaluation(self, images):
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


def test_predictions(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    recipe = write_tiny_image_run(tmp_path, **{key: STEPS[key] for key in ("training", "evaluation")})
    assert main(["run", str(recipe)]) == 0
    found, last = evaluated(run, capfd)
    assert found == pytest.approx(last, abs=1e-6)
    encoded = io.BytesIO()
    Image.new("L", (20, 24), 99).save(encoded, "PNG")
    table = pyarrow.table({"image": [{"bytes": encoded.getvalue(), "path": "a.png"}] * 3, "id": [2, 1, 0]})
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet")
    output = tmp_path / "out.parquet"
    assert main(["predict", str(run), "--input", str(tmp_path / "in.parquet"), "--output", str(output)]) == 0
    rows = pyarrow.parquet.read_table(output).to_pylist()
    assert [row.pop("id") for row in rows] == [2, 1, 0]
    for row in rows:
        check_classes({}, row)
    (tmp_path / "in.png").write_bytes(encoded.getvalue())
    images = [{"bytes": None, "path": path} for path in ("in.png", "/etc/passwd", "../in.png")]
    table = pyarrow.table({"image": [*images, {"bytes": encoded.getvalue(), "path": "/etc/passwd"}]})
    pyarrow.parquet.write_table(table, tmp_path / "named.parquet")
    words = ["--input", str(tmp_path / "named.parquet"), "--output", str(tmp_path / "named.jsonl"), "--skip-bad-rows"]
    assert main(["predict", str(run), *words]) == 0
    rows = [json.loads(line) for line in (tmp_path / "named.jsonl").read_text().splitlines()]
    assert ["outside of" in row.get("error", "") for row in rows] == [False, True, True, False]
    assert shown(rows[0]["probabilities"]) == rows[3]["probabilities"]


def test_a_sound_folder_has_a_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "_answered", answered_here)
    assert_certified(tmp_path, write_tiny_image_run, None, "transformers")


def test_the_preview() -> None:
    assert_previewed("vit_sample", ["image"], "0", "")
