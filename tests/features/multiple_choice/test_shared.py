"""Multiple choice in the preview, and in the tasks that `trainer init` proposes."""

from __future__ import annotations

import datasets

from tests.tools.init.test_shapes import rows_of
from tests.tools.test_preview import assert_previewed
from trainer.tools.init.columns import columns_of
from trainer.tools.init.shapes import shapes


def test_the_preview():
    assert_previewed("choice_sample", [f"text {number}" for number in range(4)], "0", "")


def test_columns_of_choices_are_proposed_first():
    rows = rows_of(3, question="q", choices=["a", "b"], answer=(0, 1))
    found = shapes(columns_of(datasets.Dataset.from_list(rows), 10_000))[0].task
    assert found.items() >= {"type": "multiple_choice", "label": "answer"}.items()
