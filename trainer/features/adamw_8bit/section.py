"""The section `optimizer` of a recipe with AdamW in 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from trainer.recipe.schema.optimizer import AdamWKeys, ExclusionRow, needs_whole_weights


class AdamW8bit(AdamWKeys):
    """AdamW with moments in 8 bits (Dettmers et al. 2022), in blocks that do not depend on the layout."""

    implementation: ClassVar[str] = "trainer.features.adamw_8bit.optimizer:AdamW8bit"
    state_type: ClassVar[str] = "8 bits"
    foreign_names: ClassVar[tuple[str, ...]] = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit")
    difference: ClassVar[str] = (
        "blocks are those of whole weights, embeddings have 8 bits too, and no second moment is rounded to 0"
    )
    exclusions: ClassVar[Sequence[ExclusionRow]] = needs_whole_weights(
        "a scale belongs to a block of a whole weight", "ranks cannot exchange scales", "adamw"
    )

    name: Literal["adamw_8bit"]
