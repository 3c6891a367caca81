"""The section `task`, one class for each task; language modelling is in `language.py`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trainer.recipe.schema.fields import Name
from trainer.recipe.schema.language import CausalLM
from trainer.recipe.schema.task_keys import ClassificationKeys, TextKeys, Traits


class SequenceClassification(ClassificationKeys, TextKeys):
    """Assign each text, or pair of texts, to one of several classes."""

    type: Literal["sequence_classification"]
    traits = Traits(streams=True, teacher=True)
    pipelines = ("text_classification", "sentiment_analysis")
    also_called = ("classification", "zero_shot_classification", "natural_language_inference")


class SequenceRegression(TextKeys):
    """Predict a number for each text, or pair of texts."""

    type: Literal["sequence_regression"]
    traits = Traits(streams=True)
    also_called = ("regression",)
    label: Name = "label"
    """Column of the number."""
    metrics: list[Literal["pearson", "spearman", "mse"]] = Field(default=["pearson", "spearman"], min_length=1)
    """Correlation of predicted and true numbers, or their mean squared error."""


TaskSection = SequenceClassification | SequenceRegression | CausalLM
