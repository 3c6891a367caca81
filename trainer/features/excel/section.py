"""The key of Excel files in the section `data` of a recipe."""

from __future__ import annotations

from trainer.recipe.schema import FileData
from trainer.recipe.schema.fields import Name


class ExcelKeys(FileData):
    """The sheet that is read."""

    sheet: Name | None = None
    """Name of the sheet of Excel files; null: the first one."""
