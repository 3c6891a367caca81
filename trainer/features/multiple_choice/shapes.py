"""The columns of choices, for `trainer init`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer.features import Columns

_TEXT = ("text",)


def of_choices(columns: Columns) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the section `task` and the reason for it."""
    choices = columns.get(("texts", "object"), "choices", "options", "endings")
    context = columns.get(_TEXT, "context", "question", "sentence", "article", "ctx")
    label = columns.get(("integer", "text"), "label", "answer", "answerkey")
    several = [column.name for column in columns.all if column.name.lower().startswith(("ending", "choice"))]
    names: Any = choices.name if choices else several if len(several) > 1 else None
    if names and context and label:
        task = {"type": "multiple_choice", "context": context.name, "choices": names, "label": label.name}
        yield task, "choices, and the number of the right one"
