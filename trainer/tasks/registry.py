"""The closed table of tasks: a recipe names one of these, and can name nothing else."""

from __future__ import annotations

from trainer.recipe.schema import MaskedLM, SequenceClassification, SequenceRegression, TaskSection
from trainer.tasks.masked_lm import MaskedLMTask
from trainer.tasks.sequence_classification import SequenceClassificationTask
from trainer.tasks.sequence_regression import SequenceRegressionTask
from trainer.tasks.task import Task


def build_task(recipe: TaskSection) -> Task:
    """The task of `recipe.task`, its labels not yet known."""
    texts = (recipe.text,) if isinstance(recipe.text, str) else tuple(recipe.text)
    metrics = tuple(recipe.metrics)
    match recipe:
        case SequenceClassification():
            class_names = None if recipe.labels is None else tuple(recipe.labels)
            return SequenceClassificationTask(texts, recipe.label, metrics, class_names)
        case SequenceRegression():
            return SequenceRegressionTask(texts, recipe.label, metrics)
        case MaskedLM():
            return MaskedLMTask(texts, recipe.mask_probability, metrics)
