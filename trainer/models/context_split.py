"""The split of attention over the context ranks, by the heads of a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.models.families.table import FAMILIES
from trainer.recipe.schema import Parallel

if TYPE_CHECKING:
    from trainer.parallel.sharded_sequence import ContextSplit


def context_split(config: Any, tensor: int, context: int) -> ContextSplit | None:
    """Return the split of attention over the context ranks; None for one rank, or without context parallelism.

    Each tensor rank has its share of the heads, and the context ranks beside it share those.
    """
    family = FAMILIES.get(config.model_type)
    if context == 1 or family is None or family.tensor is None or not family.tensor.context_parallel:
        return None
    from trainer.parallel.sharded_sequence import ContextSplit

    return ContextSplit.of(context, [getattr(config, name) // tensor for name in family.tensor.heads])


def context_notes(config: Any, parallel: Parallel) -> list[str]:
    """Return a note on the split of attention over the context ranks; none for one rank."""
    split = context_split(config, parallel.tensor, parallel.context)
    return [] if split is None else [f"context {parallel.context}: {split}"]
