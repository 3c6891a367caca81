"""The section `task`, one class for each task; language modelling is in `language.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from trainer.recipe.schema.fields import Name, NameKey, Share
from trainer.recipe.schema.language import CausalLM, MaskedLM
from trainer.recipe.schema.section import Contradiction, clash
from trainer.recipe.schema.task_keys import ClassificationKeys, TextKeys, Traits


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


TaskSection = SequenceClassification | SequenceRegression | MaskedLM | CausalLM
