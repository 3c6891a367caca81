"""Warnings at the end of a run, by the records of imaginary ones."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.observe.samples import run_info, step_record
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
