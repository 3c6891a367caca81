"""The section `task` of question answering."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from trainer.recipe.paths import shown_value
from trainer.recipe.schema.fields import Name
from trainer.recipe.schema.section import Contradiction, clash, repeated, shared
from trainer.recipe.schema.task_keys import TaskKeys, Traits


class QuestionAnswering(TaskKeys):
    """Find the answer to a question as a span of a context, as in SQuAD.

    A context longer than `data.max_length` is read in windows that overlap.
    """

    implementation = "trainer.features.question_answering.question_answering:QuestionAnsweringTask"
    type: Literal["question_answering"]
    traits = Traits(streams=True)
    also_called = ("extractive_question_answering", "qa", "squad")
    question: Name = "question"
    """Column of the question."""
    context: Name = "context"
    """Column of the text with the answer."""
    answers: Name | Annotated[list[Name], Field(min_length=2, max_length=2)] = "answers"
    """Column of answers as in SQuAD, {"text": [...], "answer_start": [...]}, or two columns: the text and the first
    character. Training uses the first answer."""
    stride: Annotated[int, Field(ge=0)] | None = None
    """Tokens of the context that two windows share; null: a third of `data.max_length`."""
    unanswerable: bool = False
    """Some questions have no answer, as in SQuAD 2.0."""
    null_threshold: float = 0.0
    """With `unanswerable`: predict no answer if its score exceeds the best answer's by more."""
    n_best: int = Field(20, ge=1)
    """Start and end positions of a window to combine, and answers to keep."""
    max_answer_length: int = Field(30, ge=1)
    """Maximum tokens of a predicted answer."""
    metrics: list[Literal["exact_match", "f1", "has_answer_exact_match", "has_answer_f1", "no_answer_f1"]] = Field(
        default=["exact_match", "f1"], min_length=1
    )
    """Percentage of predictions that equal an accepted answer, and mean F1 of their words, as in SQuAD; the same over
    questions with or without an answer."""

    def contradictions(self) -> Iterator[Contradiction]:
        yield from super().contradictions()
        answers = [self.answers] if isinstance(self.answers, str) else self.answers
        yield from repeated("task.answers", answers)
        yield from shared({"question": self.question, "context": self.context, "answers": answers})
        if self.unanswerable:
            return
        reason = (
            "applies to questions without an answer, but `task.unanswerable` is false; remove it, or set that to true"
        )
        if self.null_threshold != 0:
            yield clash(reason, "task.null_threshold", "task.unanswerable")
        for metric in self.metrics:
            if "_answer_" in metric:
                yield clash(f"has {shown_value(metric)}, which {reason}", "task.metrics", "task.unanswerable")
