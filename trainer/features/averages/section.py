"""The key of the section `training` of a recipe."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainer.recipe.schema import Section


class AverageKeys(Section):
    """The decay of the averages."""

    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Average the weights after each step, with this share of the old average, such as 0.999, for evaluations and
    exports."""
