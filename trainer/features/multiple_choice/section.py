"""The section `task` of multiple choice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from trainer.recipe.schema.fields import Name, NameKey
from trainer.recipe.schema.section import Contradiction, clash, repeated, shared
from trainer.recipe.schema.task_keys import TaskKeys


class MultipleChoice(TaskKeys):
    """Choose the text that fits a context, as in SWAG, HellaSwag, RACE and COPA."""

    implementation = "trainer.features.multiple_choice.multiple_choice:MultipleChoiceTask"
    type: Literal["multiple_choice"]
    also_called = ("swag",)
    context: Name = "context"
    """Column of the context, which may be truncated."""
    question: Name | None = None
    """Column of a text before each choice: a question, or the start of the endings."""
    question_texts: Annotated[dict[NameKey, str], Field(min_length=1)] | None = None
    """Text in place of each value of `question`, such as {"cause": "What was the cause?"}."""
    blank: Name | None = None
    """Part of a question that the choice replaces, such as `_`; null: it follows."""
    choices: Name | Annotated[list[Name], Field(min_length=2)] = "choices"
    """Column of lists of texts, or of {"text": [...], "label": [...]}; or a column for each choice."""
    label: Name = "label"
    """Column of the right choice."""
    label_format: Literal["index", "number", "letter", "text"] | None = None
    """Indices from 0, numbers from 1, letters from A, or texts of choices; null: the labels that `choices` holds, else
    integers are indices, and a string must mean one choice only."""
    metrics: list[Literal["accuracy"]] = Field(default=["accuracy"], min_length=1)
    """Share of rows with the right choice."""

    @property
    def texts_per_row(self) -> int:
        return len(self.choices) if isinstance(self.choices, list) else 4

    def contradictions(self) -> Iterator[Contradiction]:
        yield from super().contradictions()
        choices = [self.choices] if isinstance(self.choices, str) else self.choices
        yield from repeated("task.choices", choices)
        columns = {"context": self.context, "question": self.question, "choices": choices, "label": self.label}
        yield from shared(columns)
        for key in self.changed("question_texts", "blank") if self.question is None else []:
            text = "applies to questions, but `task.question` is null; set that"
            yield clash(text, f"task.{key}", "task.question")
