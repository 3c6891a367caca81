"""Metrics of predictions that ignore the input, with which the end of a run compares the best ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.tiny_run import write_tiny_run
from trainer.recipe.reading.loading import load_recipe
from trainer.training.run_data import prepare_data


def harmonic(number: int) -> float:
    """Return the mean reciprocal rank of one right answer among this number at random."""
    return sum(1 / rank for rank in range(1, number + 1)) / number


def assert_baseline(tmp_path: Path, recipe: str, metric: str, expected: float, within: float) -> None:
    data = prepare_data(load_recipe(recipe).recipe, 60, tmp_path)
    assert data.evaluated is not None
    assert data.task.split_baselines(data.evaluated)[metric] == pytest.approx(expected, abs=within)


def test_the_most_frequent_labels(tmp_path: Path):
    recipe = write_tiny_run(tmp_path)
    for name in ("train", "validation"):
        rows = [{"text": f"word{row}", "label": ["a", "b"] if row % 3 else ["c"]} for row in range(12)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"type": "sequence_classification", "text": "text", "multi_label": True, "metrics": ["f1_micro", "accuracy"]}
    recipe.write_text(json.dumps({**json.loads(recipe.read_text()), "task": task}))
    data = prepare_data(load_recipe(str(recipe)).recipe)
    assert data.evaluated is not None
    found = data.task.split_baselines(data.evaluated)
    assert found["accuracy"] == pytest.approx(8 / 12)
    assert found["f1_micro"] == pytest.approx(2 * 16 / (24 + 20))
