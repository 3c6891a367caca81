"""The key of the section `model.adapter`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainer.recipe.schema import Adapter

Tokens = Annotated[str, Field(min_length=1)] | Annotated[int, Field(ge=0)]


class TokenKeys(Adapter):
    """The tokens to train."""

    trainable_tokens: Annotated[list[Tokens], Field(min_length=1)] | None = None
    """Tokens or ids with rows of embedding and head to train; null: `model.new_tokens`."""
