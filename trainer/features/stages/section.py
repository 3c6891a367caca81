"""The keys `stages` and `checkpoint.continues` of a recipe."""

from __future__ import annotations

from typing import Any

from trainer.recipe.schema import Checkpoint, Section
from trainer.recipe.schema.fields import PathField


class StageKeys(Section):
    """The stages of a chain."""

    stages: list[dict[str, Any]] | dict[str, Any] | None = None
    """Trainings, each from the model of the one before: a `name`, and keys over those of the recipe; or an object that
    changes the stages of an extended recipe by name; null: one training."""


class StartKeys(Checkpoint):
    """The run to continue."""

    continues: PathField | None = None
    """Folder of a run with the same parameters and optimizer: begin with its weights and its state of the optimizer, at
    step 0; null: a new state."""
