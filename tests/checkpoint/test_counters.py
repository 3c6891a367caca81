"""Conversion of the progress to JSON and back."""

from __future__ import annotations

import json

import pytest

from trainer.checkpoint.counters import Progress
from trainer.observe.records import BestMetric


@pytest.mark.parametrize(
    "progress", [Progress(), Progress(3, 24, 2**40, BestMetric("loss", 0.1 + 0.2, 2), 1)], ids=["new", "later"]
)
def test_through_json(progress):
    assert Progress.from_json(json.loads(json.dumps(progress.to_json()))) == progress


def test_the_place_in_a_stream_may_be_missing():
    values = Progress(3, 24).to_json()
    del values["place"]
    assert Progress.from_json(values) == Progress(3, 24)
    del values["samples"]
    with pytest.raises(ValueError, match="must have the keys"):
        Progress.from_json(values)


def test_reading_leaves_the_values_alone():
    values = Progress(1).to_json()
    assert Progress.from_json(values) == Progress.from_json(values)
