"""The key `parallel.expert` of a recipe."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainer.recipe.schema import Section


class ExpertKeys(Section):
    """The ranks that divide the experts of each layer."""

    expert: Annotated[int, Field(ge=1)] = 1
    """Expert-parallel degree: data ranks that divide the experts of each layer, and exchange the tokens for them."""
