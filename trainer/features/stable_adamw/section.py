"""The section `optimizer` of a recipe with StableAdamW."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from trainer.recipe.schema.optimizer import AdamWKeys, ExclusionRow, needs_whole_weights


class StableAdamW(AdamWKeys):
    """AdamW with the clipping of updates of Adafactor (Wortsman et al. 2023), which needs no gradient clipping."""

    implementation: ClassVar[str] = "trainer.features.stable_adamw.optimizer:StableAdamW"
    exclusions: ClassVar[Sequence[ExclusionRow]] = needs_whole_weights(
        "each tensor has an update of its own size", "the sizes of updates cannot be summed", "adamw or sgd"
    )

    name: Literal["stable_adamw"]
