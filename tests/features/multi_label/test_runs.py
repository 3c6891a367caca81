"""A run, an evaluation and predictions with several labels for each row, as a user starts them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification, pipeline

from tests.helpers.tiny_run import write_tiny_run
from tests.helpers.training import NUM_CLASSES
from tests.training.test_plain_loops import assert_plain_loop
from trainer.cli import main


@pytest.mark.slow
def test_a_run_and_its_predictions(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    task = {"multi_label": True, "metrics": ["f1_micro", "f1_macro", "accuracy"], "threshold": 0.45}
    file = write_tiny_run(tmp_path, task=task)
    for name in ("train", "validation"):
        path = tmp_path / f"{name}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        lists = [[] if index % 5 == 0 else sorted({row["label"], "b"}) for index, row in enumerate(rows)]
        lines = [json.dumps({**row, "label": labels}) for row, labels in zip(rows, lists, strict=True)]
        path.write_text("\n".join(lines) + "\n")
    assert main(["run", str(file)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = [line["eval"] for line in lines if "eval" in line][-1]
    (tmp_path / "train.jsonl").unlink()
    capfd.readouterr()

    model = tmp_path / "run" / "model"
    assert main(["evaluate", str(model), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["metrics"] == pytest.approx(last, abs=1e-6)

    output = tmp_path / "out.jsonl"
    inputs = str(tmp_path / "validation.jsonl")
    assert main(["predict", str(model), "--input", inputs, "--output", str(output)]) == 0
    classify = pipeline("text-classification", str(model), top_k=None)  # a sigmoid, by `problem_type`
    for row in [json.loads(line) for line in output.read_text().splitlines()]:
        expected = {found["label"]: found["score"] for found in classify([row["text"]])[0]}
        assert row["probabilities"] == pytest.approx(expected, abs=2e-6)
        assert row["prediction"] == [name for name in "abc" if expected[name] > 0.45]


def test_losses_equal_a_plain_loop() -> None:
    options = {"num_labels": NUM_CLASSES, "problem_type": "multi_label_classification"}
    assert_plain_loop({"multi_label": True}, AutoModelForSequenceClassification, **options)
