"""The section `optimizer` of a recipe with Adafactor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from trainer.recipe.schema.optimizer import ExclusionRow, OptimizerKeys, needs_whole_weights


class Adafactor(OptimizerKeys):
    """Adafactor (Shazeer & Stern 2018): the second moments of a matrix are a row and a column."""

    implementation: ClassVar[str] = "trainer.features.adafactor.optimizer:Adafactor"
    difference: ClassVar[str] = "steps are relative to the weights; those of transformers are absolute"
    exclusions: ClassVar[Sequence[ExclusionRow]] = needs_whole_weights(
        "the update of a matrix needs all of it", "matrices cannot be gathered", "adamw or sgd"
    )

    name: Literal["adafactor"]
    learning_rate: float = Field(0.01, gt=0)
    """Peak learning rate of the schedule, relative to the size of each weight; at most 1 / sqrt(step)."""
    beta2_decay: float = Field(-0.8, le=0)
    """Exponent of the step in the decay rate of second moments."""
    clip_threshold: float = Field(1.0, ge=1)
    """Maximum root mean square of an update."""
    minimum_scale: float = Field(1e-3, ge=0)
    """Minimum size of a weight, which scales its update."""
