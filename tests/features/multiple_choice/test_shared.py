"""Multiple choice in the preview, and in the tasks that `trainer init` proposes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest

from tests.data.test_keys import assert_each_field_has_a_key
from tests.helpers.training import TINY_TASKS
from tests.tools.init.test_shapes import rows_of
from tests.tools.plan.test_truth import assert_planned_peak
from tests.tools.test_preview import assert_previewed
from tests.training.test_odd_rows import assert_odd_rows_train
from trainer.features.multiple_choice.section import MultipleChoice
from trainer.tools.init.columns import columns_of
from trainer.tools.init.shapes import shapes


def test_the_preview():
    assert_previewed("choice_sample", [f"text {number}" for number in range(4)], "0", "")


def test_columns_of_choices_are_proposed_first():
    rows = rows_of(3, question="q", choices=["a", "b"], answer=(0, 1))
    found = shapes(columns_of(datasets.Dataset.from_list(rows), 10_000))[0].task
    assert found.items() >= {"type": "multiple_choice", "label": "answer"}.items()


@pytest.mark.nightly
def test_odd_rows(tmp_path: Path):
    def row(text: str, number: int) -> dict[str, Any]:
        choices = ["word1", text or "word2", "[SEP]"][: 2 + number % 2]
        return {"context": text, "choices": choices, "label": number % 2}

    assert_odd_rows_train(tmp_path, row, {"type": "multiple_choice"})


def test_each_field_has_a_key(tmp_path: Path):
    assert_each_field_has_a_key(
        tmp_path, MultipleChoice(type="multiple_choice", context="text", choices="choices", label="right")
    )


@pytest.mark.nightly
def test_the_planned_peak():
    assert_planned_peak({"task": TINY_TASKS["multiple_choice"].keys})
