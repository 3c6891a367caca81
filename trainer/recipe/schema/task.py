"""The section `task`, one class for each task; language modelling is in `language.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from trainer.recipe.schema.fields import Name, NameKey, Share
from trainer.recipe.schema.language import CausalLM, MaskedLM, Seq2SeqLM
from trainer.recipe.schema.section import Contradiction, clash, repeated, shared
from trainer.recipe.schema.task_keys import ClassificationKeys, ImageKeys, Start, TaskKeys, TextKeys, Traits


class SequenceClassification(ClassificationKeys, TextKeys):
    """Assign each text, or pair of texts, to one of several classes."""

    type: Literal["sequence_classification"]
    traits = Traits(streams=True, teacher=True)
    also_called = (
        "text_classification",
        "classification",
        "sentiment_analysis",
        "zero_shot_classification",
        "natural_language_inference",
    )
    multi_label: bool = False
    """Any number of labels a row: `label` holds lists of names, or of 0 and 1 for each of `labels`. `accuracy` counts
    rows with all labels right."""
    threshold: Share | dict[NameKey, Share] = 0.5
    """With `multi_label`: probability above which a label is predicted; an object: by name."""

    def contradictions(self) -> Iterator[Contradiction]:
        yield from super().contradictions()
        one_class = "applies to one class for each row, but `task.multi_label` is true"
        if self.multi_label:
            for metric in self.metrics:
                if metric not in ("f1", "matthews"):
                    continue
                text = f'has "{metric}", which {one_class}; use "f1_micro" or "f1_macro"'
                yield clash(text, "task.metrics", "task.multi_label")
            for key in self.changed("class_weights", "label_smoothing"):
                yield clash(f"{one_class}; remove it", f"task.{key}", "task.multi_label")
        elif self.changed("threshold"):
            problem = "applies to several labels for each row, but `task.multi_label` is false"
            yield clash(f"{problem}; remove it, or set that to true", "task.threshold", "task.multi_label")


class SequenceRegression(TextKeys):
    """Predict a number for each text, or pair of texts."""

    type: Literal["sequence_regression"]
    traits = Traits(streams=True)
    also_called = ("regression",)
    label: Name = "label"
    """Column of the number."""
    metrics: list[Literal["pearson", "spearman", "mse"]] = Field(default=["pearson", "spearman"], min_length=1)
    """Correlation of predicted and true numbers, or their mean squared error."""


class MultipleChoice(TaskKeys):
    """Choose the text that fits a context, as in SWAG, HellaSwag, RACE and COPA."""

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


class ImageClassification(ClassificationKeys, ImageKeys):
    """Assign each image to one of several classes."""

    type: Literal["image_classification"]
    traits = Traits(streams=True, teacher=True)
    start = Start("vit_sample", "google/vit-base-patch16-224-in21k", 5e-5)


TaskSection = (
    SequenceClassification | SequenceRegression | MaskedLM | CausalLM | ImageClassification | Seq2SeqLM | MultipleChoice
)
