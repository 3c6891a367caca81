"""The section `schedule`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainer.recipe.schema.section import Section


class Schedule(Section):
    """Learning rate over the steps: linear warmup, then decay."""

    name: Literal["linear", "cosine", "constant"] = "linear"
    """linear and cosine reach 0 at the last step; constant does not decay."""
    warmup: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, lt=1)] = 0
    """Steps (an integer such as 100), or a fraction of all steps (such as 0.1)."""
