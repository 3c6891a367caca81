"""The key `parallel.context` of a recipe."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainer.recipe.schema import Section


class ContextKeys(Section):
    """The ranks that share the positions of a row."""

    context: Annotated[int, Field(ge=1)] = 1
    """Context-parallel degree: ranks that shard the positions of the same rows in all layers. They share heads
    (DeepSpeed-Ulysses), and form rings (Ring Attention) where heads do not suffice."""
