"""Shipped and registered tasks, which a recipe selects by name, never by code.

A section may name its class in `implementation`. The class of another shipped task is named after its section, and
stands in the module of its type's name. A run imports its own task only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainer.base.errors import UsageError
from trainer.base.extensions import Registration, consume, registered, resolved
from trainer.recipe.registered import task_sections
from trainer.recipe.schema import TaskSection
from trainer.tasks.exported import Card
from trainer.tasks.task import Task

_REGISTERED: dict[str, Callable[[Any], Task]] = {}
"""The builders of registered tasks."""
_CARDS: dict[str, Card] = {}
"""The cards of registered tasks."""


def _add(row: Registration) -> None:
    if isinstance(row.value, str):  # the section of a folder names its class
        return
    _REGISTERED[row.name] = resolved(row.value.build)
    _CARDS[row.name] = Card(row.value.pipeline_tag)


consume("task", _add)


def build_task(recipe: TaskSection) -> Task:
    """Build the task of a recipe's section `task`; `resolve` adds the labels of the training split."""
    build = _REGISTERED.get(recipe.type)
    task = (_variant_of(recipe) or _class_of(recipe.type)).of(recipe) if build is None else build(recipe)
    if not isinstance(task, Task):
        raise UsageError(
            f"the registered task {recipe.type} must be a `Task`, such as a `TextTask` of `trainer.tasks.task`, but its"
            f" builder returns a {type(task).__name__}; make it a subclass"
        )
    return task


def _variant_of(recipe: TaskSection) -> type[Task] | None:
    """Return the class that a key of the section asks for."""
    rows = (row for row in registered("variant") if getattr(recipe, row.name.removeprefix("task."), None))
    return next((resolved(row.value) for row in rows), None)


def card_of(task_type: str) -> Card | None:
    """Return the facts of a task for model cards; None: the task is unknown."""
    if task_type in _CARDS or task_type not in task_sections():
        return _CARDS.get(task_type)
    return _class_of(task_type).card


def _class_of(task_type: str) -> type[Task]:
    section = task_sections()[task_type]
    kind: type[Task] = resolved(section.implementation or f"trainer.tasks.{task_type}:{section.__name__}Task")
    return kind
