"""Question answering in the preview and in the baselines of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import trainer
from tests.data.test_keys import assert_each_field_has_a_key
from tests.helpers.training import TINY_TASKS
from tests.tasks.test_split_baselines import assert_baseline
from tests.tools.plan.test_truth import assert_planned_peak
from tests.tools.test_preview import assert_previewed
from tests.training.test_odd_rows import assert_odd_rows_train
from trainer.features.question_answering.section import QuestionAnswering
from trainer.recipe.reading.loading import load_recipe


def test_the_preview():
    answer = "true if the module specified by fullname is a package"
    assert_previewed("qa_sample", ["text"], "tokens 22 to 32", answer)


def test_the_preview_counts_windows():
    found = trainer.preview(load_recipe("qa_sample", ["data.max_length=48", "task.stride=8"]), rows=6)
    assert [row.window for row in found.rows if row.window][:2] == ["window 1 of 2 of row 1", "window 2 of 2 of row 1"]


def test_the_baseline_of_the_sample(tmp_path: Path):
    assert_baseline(tmp_path, "qa_sample", "f1", 100 * 7 / 60, 1e-9)  # 7 rows have no answer


@pytest.mark.nightly
def test_odd_rows(tmp_path: Path):
    """Rows with a long context, so that most windows have no answer, and rows without an answer."""

    def row(text: str, number: int) -> dict[str, Any]:
        context = " ".join(f"word{place}" for place in range(1, 40)) if number % 2 else text or "word5"
        first = context.split()[0]
        answers = {"text": [first], "answer_start": [0]} if number % 3 else {"text": [], "answer_start": []}
        return {"question": "word1", "context": context, "answers": answers}

    assert_odd_rows_train(tmp_path, row, {"type": "question_answering", "unanswerable": True})


def test_each_field_has_a_key(tmp_path: Path):
    assert_each_field_has_a_key(
        tmp_path, QuestionAnswering(type="question_answering", question="other", context="text")
    )


@pytest.mark.nightly
def test_the_planned_peak():
    assert_planned_peak({"task": TINY_TASKS["question_answering"].keys})
