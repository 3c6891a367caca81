"""The section `optimizer` of a recipe with Muon."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from trainer.recipe.schema.optimizer import AdamWKeys, ExclusionRow, needs_whole_weights


class Muon(AdamWKeys):
    """Muon (Jordan et al. 2024) for the matrices of the repeated layers; AdamW for all other parameters.

    Updates of matrices have the size of AdamW's (Liu et al. 2025), so both share learning rate and weight decay.
    """

    implementation: ClassVar[str] = "trainer.features.muon.optimizer:Muon"
    needs_layers: ClassVar[bool] = True
    tolerances: ClassVar[tuple[float, float] | None] = (1e-4, 1e-3)  # in fp32; its iterations are in bf16
    exclusions: ClassVar[Sequence[ExclusionRow]] = needs_whole_weights(
        "the update of a matrix needs all of it", "matrices cannot be gathered", "adamw or sgd"
    )

    name: Literal["muon"]
    learning_rate: float = Field(gt=0)
    """Peak learning rate of the schedule."""
    weight_decay: float = Field(0.1, ge=0)
    """Not applied to biases and norm weights."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Decay rate of the running mean of a matrix's gradient."""
    iterations: int = Field(5, ge=1, le=99)
    """Newton-Schulz iterations, in bf16."""
