"""The key `fp8_features` of a recipe."""

from __future__ import annotations

from typing import Annotated, cast

from pydantic import Field

from trainer.recipe.schema import Recipe, Section


class Fp8Keys(Section):
    """The layers with products in fp8."""

    fp8_features: Annotated[int, Field(ge=1)] | None = None
    """Linear layers inside the repeated layers multiply in fp8 if their inputs and outputs number at least this, such
    as 2048; all else computes in bf16. null: no layer does."""


def smallest(recipe: Recipe) -> int:
    """Return the fewest inputs and outputs of a layer in fp8; the recipe asks for such layers."""
    features = cast(Fp8Keys, recipe).fp8_features
    assert features is not None
    return features
