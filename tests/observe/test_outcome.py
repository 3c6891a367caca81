"""Warnings at the end of a run, by the records of imaginary ones."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.helpers.tiny_run import write_tiny_run
from tests.observe.samples import run_info, step_record
from trainer.cli import main
from trainer.observe.outcome import Outcome
from trainer.observe.records import BestMetric, EvaluationRecord

FINE = BestMetric("accuracy", 0.9, 8)


@pytest.mark.parametrize(
    ("losses", "evaluated", "best", "expected"),
    [
        ([0.7, 0.5, 0.3, 0.2], 0.3, FINE, []),
        ([0.9, 0.8, 0.3, 0.8], 0.7, FINE, []),
        ([0.7, 3400.0], None, FINE, ["diverged"]),
        ([3000.0, 3400.0], None, FINE, ["diverged"]),
        ([0.7] * 9 + [3400.0], 0.7, FINE, []),
        ([0.7] * 9 + [3400.0], 3400.0, FINE, ["diverged"]),
        ([0.7, 0.5], 0.6, BestMetric("accuracy", 0.68, 8), ["does not beat 0.6800"]),
        ([0.7, 0.5], 0.6, BestMetric("accuracy", math.nan, 8), ["does not beat 0.6800"]),
        ([0.7, 0.5], 0.6, BestMetric("f1", 0.0, 8), []),
        ([], None, None, []),
    ],
)
def test_warnings(losses: list[float], evaluated: float | None, best: BestMetric | None, expected: list[str]):
    outcome = Outcome()
    baselines = {"accuracy": 0.68, "loss": 0.63}
    outcome.start(run_info(Path("run"), baselines=baselines, recipe={"optimizer": {"learning_rate": 50.0}}))
    for step, loss in enumerate(losses, start=1):
        outcome.step(step_record(step, loss=loss))
    if evaluated is not None:
        outcome.evaluation(EvaluationRecord(len(losses), {"loss": evaluated}))
    found = outcome.warnings(best)
    assert len(found) == len(expected)
    assert all(text in line for text, line in zip(expected, found, strict=True))
    assert all("(50.0)" in line for line in found if "diverged" in line)


def test_a_whole_run_that_teaches_nothing_ends_in_warnings(tmp_path, capsys):
    task = {"type": "sequence_classification", "text": "text", "metrics": ["accuracy"]}
    assert_warned(tmp_path, capsys, task, 50, 2)


def assert_warned(tmp_path, capsys, task, rate, warnings):
    """All candidates of an embedding and of a query are equal, so that no model can rank them."""
    recipe = write_tiny_run(tmp_path, evaluation={"every": "8 steps"}, logging={"to": ["jsonl", "console"]})
    keys = json.loads(recipe.read_text())
    recipe.write_text(json.dumps({**keys, "task": task}))
    for rows in (tmp_path / "train.jsonl", tmp_path / "validation.jsonl"):
        own = [json.loads(line) for line in rows.read_text().splitlines()]
        alike = {"other": "word1"} | ({"label": "word1"} if rate < 1 else {})
        rows.write_text("".join(json.dumps({**row, **alike}) + "\n" for row in own))
    assert main(["run", str(recipe), f"optimizer.learning_rate={rate}"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("which a prediction that ignores the input reaches") == 1
    assert shown.count("the loss diverged: ") == warnings - 1
