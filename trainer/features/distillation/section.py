"""The section `distillation` of a recipe, and its rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from pydantic import Field

from trainer.recipe.registered import task_sections
from trainer.recipe.schema import Parallel, Recipe, TaskSection
from trainer.recipe.schema.fields import HubOrPathField, Revision
from trainer.recipe.schema.section import Contradiction, Section, clash, hub_or_folder
from trainer.recipe.strategies import NO_DP


class Distillation(Section):
    """Knowledge distillation (Hinton et al. 2015): learn from the outputs of a frozen teacher beside the labels."""

    teacher: HubOrPathField
    """A trained model of the same task: a name on the hub, or a folder."""
    revision: Revision = None
    temperature: float = Field(2.0, gt=0)
    """Divisor of both models' logits in the divergence."""
    weight: float = Field(0.5, gt=0, le=1)
    """The loss is (1 - weight) * loss of the labels + weight * temperature^2 * divergence."""

    def contradictions(self) -> Iterator[Contradiction]:
        return hub_or_folder("distillation.teacher", self.teacher, self.revision)


class DistillationKeys(Section):
    """The key of a recipe."""

    distillation: Distillation | None = None
    """A frozen teacher to learn from beside the labels; null: none."""


def keys_of(recipe: Recipe) -> Distillation:
    """Return the keys of a recipe with a teacher."""
    keys = cast(DistillationKeys, recipe).distillation
    assert keys is not None
    return keys


def contradictions(distillation: Distillation, task: TaskSection, parallel: Parallel) -> Iterator[Contradiction]:
    if not task.traits.teacher:
        others = ", ".join(name for name, keys in task_sections().items() if keys.traits.teacher)
        text = f"is for {others}, but `task.type` is {task.type}; remove it"
        yield clash(text, "distillation", "task.type")
    if getattr(task, "multi_label", False):
        text = "compares the probabilities of one class for each row, but `task.multi_label` is true; remove it"
        yield clash(text, "distillation", "task.multi_label")
    if isinstance(getattr(task, "logits_chunk", None), int):
        text = "needs the logits of the whole vocabulary, but `task.logits_chunk` is a number; set that to null"
        yield clash(text, "distillation", "task.logits_chunk")
    if parallel.strategy == "dp":
        yield clash(NO_DP, "distillation", "parallel.strategy")
