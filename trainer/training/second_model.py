"""The second model of a training, which a feature registers under the key of its place, such as a teacher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.models.added_loss import AddedLoss
from trainer.models.describe import ModelDescription
from trainer.models.place import PlacedModel
from trainer.parallel.mesh import ParallelMesh
from trainer.recipe.plan import RunPlan
from trainer.recipe.registered import asked_for
from trainer.recipe.schema import Recipe
from trainer.tasks.task import Task
from trainer.training.preparation import Preparation


@dataclass(frozen=True)
class LoadedModel:
    """The loss of a second model, and facts for the identity of a training that stand for keys of the recipe.

    `loss` is None without a second model, and on ranks that do not compute it.
    """

    loss: AddedLoss | None = None
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by section and key


class SecondModel:
    """The questions of a run, a check and a plan about a frozen model beside the trained one."""

    def describe(self, recipe: Recipe, task: Task, padding_token: int | None = None) -> ModelDescription:
        """Describe the model for the task of the trained one.

        Raises:
            RecipeError: it is missing, or of another task.
        """
        raise NotImplementedError

    def class_names(self, recipe: Recipe, task: Task) -> Sequence[str]:
        """Return the names of its classes, in the order of its head."""
        raise NotImplementedError

    def check(self, plan: RunPlan, task: Task, preparation: Preparation | None) -> ModelDescription:
        """Describe the model, and check its files against the trained one, without a read of its weights.

        Args:
            task: the task, perhaps without its classes.
            preparation: that of the trained model; None if it is not on this machine.

        Raises:
            UsageError: the model is missing, of another task, or does not read the inputs of the trained one.
            RecipeError: several of these hold.
        """
        raise NotImplementedError

    def load(self, plan: RunPlan, mesh: ParallelMesh, task: Task, described: ModelDescription) -> LoadedModel:
        """Load the model. All ranks must call it.

        Args:
            task: the task, with its classes.

        Raises:
            UsageError: it cannot be loaded, is of another task, or cannot be cut over the tensor ranks.
        """
        raise NotImplementedError

    def is_needed(self, plan: RunPlan, mesh: ParallelMesh) -> bool:
        """Return whether this rank computes the loss."""
        raise NotImplementedError

    def place(self, built: PlacedModel, plan: RunPlan, mesh: ParallelMesh, task: Task) -> AddedLoss:
        """Place the built model on the device; return its loss."""
        raise NotImplementedError


def second_model(recipe: Recipe) -> SecondModel | None:
    """Return the second model that a recipe names; None: there is none."""
    return next((kind() for kind in asked_for("second_model", recipe)), None)
