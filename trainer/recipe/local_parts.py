"""The parts of a recipe that are on this machine: model, tokenizer and data. The others are names on the hub."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.recipe.schema import HubData, ImageKeys

if TYPE_CHECKING:
    from trainer.recipe.schema import Recipe


@dataclass(frozen=True)
class LocalParts:
    """Whether the parts of a recipe are on this machine; `notes` name the others."""

    has_model: bool
    has_tokenizer: bool
    has_data: bool
    notes: tuple[str, ...] = ()
    has_teacher: bool = False

    @classmethod
    def of(cls, recipe: Recipe) -> LocalParts:
        """Return the parts of a resolved recipe that are on this machine."""
        model, data = recipe.model, recipe.data
        has_model = model.name_or_path is None or os.path.isabs(model.name_or_path)
        has_tokenizer = os.path.isabs(model.tokenizer) if model.tokenizer else has_model
        has_data = not isinstance(data, HubData) or os.path.isabs(data.name)
        teacher = None if recipe.distillation is None else recipe.distillation.teacher
        has_teacher = teacher is not None and os.path.isabs(teacher)
        on_hub = [
            f"`{key}` is not checked: {name} is a name on the hub"
            for key, name, is_here in (
                ("model.name_or_path", model.name_or_path, has_model),
                ("model.tokenizer", model.tokenizer, has_tokenizer or model.tokenizer is None),
                ("distillation.teacher", teacher, has_teacher or teacher is None),
                ("data.name", getattr(data, "name", None), has_data),
            )
            if not is_here
        ]
        # An image processor comes with the model.
        is_readable = has_data and (has_model or not isinstance(recipe.task, ImageKeys))
        return cls(has_model, has_tokenizer, is_readable, tuple(on_hub), has_teacher)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to check."""
        return not self.has_model and not self.has_data
