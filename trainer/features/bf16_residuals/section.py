"""The key `residuals` of a recipe."""

from __future__ import annotations

from typing import Literal

from trainer.recipe.schema import Section


class ResidualKeys(Section):
    """The hidden states between layers."""

    residuals: Literal["fp32", "bf16"] = "fp32"
    """Type of the hidden states to which layers add their outputs, with `precision` bf16. bf16: less memory and
    traffic, and a rounding after each addition."""
