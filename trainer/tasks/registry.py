"""The closed table of tasks: a recipe names one of these, and can name nothing else."""

from __future__ import annotations

from trainer.recipe.schema import (
    ImageClassification,
    MaskedLM,
    SequenceClassification,
    SequenceRegression,
    TaskSection,
)
from trainer.tasks.image_classification import ImageClassificationTask
from trainer.tasks.masked_lm import MaskedLMTask
from trainer.tasks.sequence_classification import SequenceClassificationTask
from trainer.tasks.sequence_regression import SequenceRegressionTask
from trainer.tasks.task import ImageTask, TextTask

PIPELINE_TAGS = {
    "sequence_classification": "text-classification",
    "sequence_regression": "text-classification",
    "masked_lm": "fill-mask",
    "image_classification": "image-classification",
}
"""What the hub, and the pipelines of transformers, call each type of task."""


def build_task(recipe: TaskSection) -> TextTask | ImageTask:
    """The task of `recipe.task`, its labels not yet known."""
    metrics = tuple(recipe.metrics)
    match recipe:
        case SequenceClassification():
            return SequenceClassificationTask(_columns(recipe.text), recipe.label, metrics, _names(recipe.labels))
        case SequenceRegression():
            return SequenceRegressionTask(_columns(recipe.text), recipe.label, metrics)
        case MaskedLM():
            return MaskedLMTask(_columns(recipe.text), recipe.mask_probability, metrics)
        case ImageClassification():
            shape = None if recipe.shape is None else tuple(recipe.shape)
            return ImageClassificationTask(recipe.image, recipe.label, metrics, _names(recipe.labels), shape=shape)


def _columns(text: str | list[str]) -> tuple[str, ...]:
    return (text,) if isinstance(text, str) else tuple(text)


def _names(labels: list[str] | None) -> tuple[str, ...] | None:
    return None if labels is None else tuple(labels)
