from __future__ import annotations

from typing import Any

import datasets
import pytest

from trainer.tools.init.columns import columns_of
from trainer.tools.init.shapes import shapes

SQUAD = {"id": "1", "title": "t", "context": "a b c", "question": "q", "answers": {"text": ["b"], "answer_start": [2]}}
UNANSWERED = SQUAD | {"answers": {"text": [], "answer_start": []}}


@pytest.mark.parametrize(
    ("rows", "task"),
    [
        ([SQUAD], {"type": "question_answering", "answers": "answers"}),
        ([SQUAD, UNANSWERED], {"type": "question_answering", "unanswerable": True}),
    ],
)
def test_questions_are_proposed_first(rows: list[dict[str, Any]], task: dict[str, Any]) -> None:
    found = shapes(columns_of(datasets.Dataset.from_list(rows), 10_000))
    assert found[0].task.items() >= task.items()
