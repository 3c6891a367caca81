"""The key `weights` of a recipe."""

from __future__ import annotations

from typing import Literal

from trainer.recipe.schema import Section


class WeightKeys(Section):
    """The storage of weights."""

    weights: Literal["fp32", "bf16_compensated", "bf16_stochastic"] = "fp32"
    """Storage of the trained weights of matrix products with `precision` bf16; all other weights are fp32.
    bf16_compensated: bf16, and in the optimizer the 16 bits that rounding cuts off; bf16_stochastic: bf16 alone,
    rounded at random."""
