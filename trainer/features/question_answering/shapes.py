"""The columns of questions, for `trainer init`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer.features import Columns

_TEXT = ("text",)


def of_questions(columns: Columns) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the section `task` and the reason for it."""
    question, context = columns.get(_TEXT, "question"), columns.get(_TEXT, "context")
    if question is None or context is None:
        return
    answers = columns.get(("object", "objects"), "answers", "answer")
    start = columns.get(("integer", "number"), "answer_start")
    text = columns.get(_TEXT, "answer_text", "answer", "answers")
    if answers is None and (start is None or text is None):
        return
    keys: dict[str, Any] = {"question": question.name, "context": context.name}
    if answers is not None:
        keys["answers"] = answers.name
        empty = any(isinstance(value, dict) and not value.get("text") for value in answers.values)
        if empty:
            keys["unanswerable"] = True
    elif start is not None and text is not None:
        keys["answers"] = [text.name, start.name]
    yield {"type": "question_answering", **keys}, "answers as parts of a context, as in SQuAD"
