"""Descriptions of the models of a run: the trained model, and a second one, such as a teacher."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.models.describe import ModelDescription, ModelUse, describe
from trainer.recipe.schema import Recipe
from trainer.tasks.task import Task
from trainer.training.second_model import second_model


@dataclass(frozen=True)
class DescribedModels:
    model: ModelDescription
    second: ModelDescription | None  # None: there is none


def describe_models(recipe: Recipe, task: Task, padding_token: int | None) -> DescribedModels:
    """Describe the models of a recipe for its resolved task; for the arguments see `ModelUse`."""
    second = second_model(recipe)
    described = second.describe(recipe, task, padding_token) if second else None
    return DescribedModels(describe_model(recipe, task, padding_token), described)


def describe_model(recipe: Recipe, task: Task, padding_token: int | None = None) -> ModelDescription:
    """Describe the trained model of a recipe; transformers' number of classes stands in for an unknown one."""
    use = ModelUse(
        task.auto_class_name,
        {} if task.class_names is None else task.model_options(),
        padding_token,
        task.unused_modules,
        task.packs_documents,
        added=task.added_module(),
    )
    return describe(recipe.model, recipe.training, use, recipe.optimizer)
