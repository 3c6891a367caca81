"""Descriptions of the models of a run: the trained model, and the teacher of a distillation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from trainer.base.errors import Problems, RecipeError
from trainer.models.describe import ModelDescription, ModelUse, describe
from trainer.recipe.schema import Model, Recipe
from trainer.tasks.task import Task


@dataclass(frozen=True)
class DescribedModels:
    model: ModelDescription
    teacher: ModelDescription | None  # None without a distillation


def describe_models(recipe: Recipe, task: Task, padding_token: int | None) -> DescribedModels:
    """Describe the models of a recipe for its resolved task; for the arguments see `ModelUse`."""
    teacher = None if recipe.distillation is None else describe_teacher(recipe, task, padding_token)
    return DescribedModels(describe_model(recipe, task, padding_token), teacher)


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


def describe_teacher(recipe: Recipe, task: Task, padding_token: int | None = None) -> ModelDescription:
    """Describe the teacher of a recipe for the student's task.

    Raises:
        RecipeError: the teacher is missing, or of another task.
    """
    assert recipe.distillation is not None
    teacher = Model(name_or_path=recipe.distillation.teacher, revision=recipe.distillation.revision)
    use = ModelUse(task.auto_class_name, {}, padding_token, packed=task.packs_documents, is_trained=False)
    with naming_the_teacher():
        return describe(teacher, recipe.training, use)


@contextmanager
def naming_the_teacher() -> Iterator[None]:
    """Let errors of the functions that load and check models name the teacher."""
    key, problems = "`distillation.teacher`", Problems()
    with problems.collect():
        yield
    if problems.messages:
        own = [text.replace("`model.name_or_path`", key) for text in problems.messages]
        raise RecipeError(*(text if key in text else f"{key}: {text}" for text in own))
