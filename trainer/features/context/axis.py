"""The context axis of a model: its families, the function of its attention, and its notes."""

from __future__ import annotations

from typing import Any

from trainer.base.errors import UsageError
from trainer.features.context.attention import HEADS_ATTENTION, RING_ATTENTION
from trainer.features.context.cut import ContextCut, ContextSplit
from trainer.models.families.table import FAMILIES
from trainer.models.sequence_axis import SequenceAxis
from trainer.parallel.groups import group_size
from trainer.parallel.row_groups import RowGroups
from trainer.parallel.sharded_sequence import LayerCut
from trainer.recipe.plan import Layout


def is_supported(model_type: str) -> bool:
    """Return whether the family of a model has context parallelism."""
    family = FAMILIES.get(model_type)
    return family is not None and family.tensor is not None and family.tensor.context_parallel


def split_of(config: Any, tensor: int, context: int) -> ContextSplit:
    """Return the split of attention over the context ranks.

    Each tensor rank has its share of the heads, and the context ranks beside it share those.
    """
    plan = FAMILIES[config.model_type].tensor
    assert plan is not None, "the family is supported"
    return ContextSplit.of(context, [getattr(config, name) // tensor for name in plan.heads])


class ContextAxis(SequenceAxis):
    """The cut of sequences over context ranks."""

    def check(self, model_type: str) -> None:
        if not is_supported(model_type):
            raise UsageError(
                f"`parallel.context` must be 1: the family {model_type} has no context parallelism; use"
                " `activation_checkpointing` full for long sequences"
            )

    def set_attention(self, config: Any, groups: RowGroups) -> None:
        # transformers looks up the function of this name in each forward pass.
        config._attn_implementation = RING_ATTENTION if _split(config, groups).ring > 1 else HEADS_ATTENTION

    def layer_cut(self, config: Any, groups: RowGroups) -> LayerCut:
        return ContextCut(groups.context, _split(config, groups))

    def notes(self, config: Any, layout: Layout) -> list[str]:
        if not is_supported(config.model_type):
            return []
        return [f"context {layout.cp}: {split_of(config, layout.tp, layout.cp)}"]


def _split(config: Any, groups: RowGroups) -> ContextSplit:
    return split_of(config, group_size(groups.tensor), group_size(groups.context))
