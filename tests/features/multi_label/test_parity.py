"""Parity of several labels of a row: the same training under every layout as on one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.test_keys import assert_each_field_has_a_key
from tests.helpers.ranks import RankPools
from tests.parity.test_tasks import (
    LAYOUTS,
    assert_accumulation_changes_nothing,
    assert_layout_is_one_process,
    marks_of,
)
from tests.training.test_odd_rows import assert_odd_rows_train
from trainer.recipe.schema import SequenceClassification

TASK = "multi_label"


@pytest.mark.slow
def test_accumulation_on_one_process_changes_nothing():
    assert_accumulation_changes_nothing(TASK)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=marks_of(name, (), ("fsdp-accumulated",))) for name in LAYOUTS]
)
def test_any_layout_is_one_process(ranks: RankPools, layout: str):
    assert_layout_is_one_process(ranks, TASK, layout)


@pytest.mark.nightly
def test_odd_rows(tmp_path: Path):
    task = {"type": "sequence_classification", "text": "text", "multi_label": True, "metrics": ["f1_micro"]}
    assert_odd_rows_train(tmp_path, lambda text, number: {"text": text, "label": ["a", "b"][: number % 3]}, task)


def test_each_field_has_a_key(tmp_path: Path):
    section = SequenceClassification(type="sequence_classification", text="text", label="lists", multi_label=True)
    assert_each_field_has_a_key(tmp_path, section)
