"""The key `model.adapter.start_folder` of a recipe."""

from __future__ import annotations

from trainer.recipe.schema import Adapter
from trainer.recipe.schema.fields import PathField


class FolderKeys(Adapter):
    """The folder of an adapter to go on with."""

    start_folder: PathField | None = None
    """A folder of PEFT with the values that the products begin with; null: `start` gives them."""
