"""The attention functions of context ranks for transformers' models, by heads and around a ring, and their masks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainer.base.errors import UsageError
from trainer.features.context.blocks import BlockAttention, BlockMask, Ring, ring_attention
from trainer.features.context.cut import ContextCut, cut_of
from trainer.models.attention import (
    FORMS,
    KEYED_ATTENTION,
    AttentionForm,
    attention,
    hides_nothing,
    in_autocast_type,
    is_causal_call,
    next_row_keys,
    notes_of_masks,
    notes_of_rows,
    obstacle_of_states,
    scale_of,
    variant_of,
)
from trainer.models.checkpointing import not_recorded
from trainer.models.dropout import has_site, site_of
from trainer.parallel.kernel_support import missing

if TYPE_CHECKING:
    from trainer.parallel.flat_rows import FlatRows

HEADS_ATTENTION = "trainer_heads"
"""Keyed attention of this rank's heads to all positions."""
FLAT_HEADS_ATTENTION = "trainer_packed_heads"
"""The same function for rows that are always joined; the model makes no mask."""
RING_ATTENTION = "trainer_ring"
"""Keyed attention around a ring, with masks that are computed block by block."""


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, flat: FlatRows | None = None,
    **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute attention of a module with a cut; states are this rank's positions, with all heads."""
    cut = cut_of(module)
    query, key, value = (cut.to_heads(states) for states in (query, key, value))
    if cut.of_heads.ring > 1:
        output = around_ring(cut, module, query, key, value, attention_mask, flat, **options)
    else:
        output, _ = attention(module, query, key, value, attention_mask, flat, **options)
    # The exchanges expect heads before positions, attention returns positions before heads.
    return cut.to_positions(output.transpose(1, 2)).transpose(1, 2), None


def around_ring(
    cut: ContextCut,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    flat: FlatRows | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> Tensor:
    """Return the output `[batch, queries, heads, head_dim]` of attention to the keys of all ranks of a ring.

    The arguments are those of `keyed_attention`, with blocks of positions. Evaluation computes the same blocks, without
    dropout.
    """
    if variant := variant_of(kwargs):
        raise UsageError(
            f"this model's attention uses {variant}, which has no form for a ring of ranks; set `parallel.context` to"
            f" {cut.of_heads.heads}, which needs no ring"
        )
    query, key, value = map(in_autocast_type, (query, key, value))
    row_keys = None
    if dropout:
        assert has_site(module), "context ranks need keyed dropout"
        row_keys = next_row_keys(module, query, flat)
    fused = missing("attention", query.device) is None
    if fused and (obstacle := obstacle_of_states(query, key, value)):
        warnings.warn(f"attention around a ring runs without the fused kernel, because {obstacle}", stacklevel=2)
        fused = False
    mask = (
        attention_mask
        if attention_mask is None or isinstance(attention_mask, BlockMask)
        else BlockMask.of(attention_mask)
    )
    if flat is not None:
        assert not isinstance(attention_mask, Tensor), "a whole mask is that of padded rows"
        # Flat rows hide no position, so only the mask of positions is left.
        mask = mask and mask.of_tokens
        row_keys = row_keys if row_keys is None else row_keys[flat.order]
    options = BlockAttention(
        scale_of(query, scaling),
        dropout,
        mask,
        mask is None and is_causal_call(module, is_causal),
        site_of(module).offsets(query.shape)[1] if row_keys is not None else 0,
        fused,
    )
    ring = Ring(cut.group, cut.of_heads.heads, cut.block, cut.blocks, flat.lengths if flat else None)
    # Selective recomputation would keep the scores of each block, which are products of matrices.
    return not_recorded(ring_attention)(query, key, value, row_keys, options, ring)  # type: ignore[no-any-return]


def _block_mask(
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **options: Any,
) -> BlockMask | None:
    """Return the mask of `sdpa_mask` for the same arguments, without a tensor of all queries and all keys."""
    skips = allow_is_causal_skip or allow_is_bidirectional_skip

    def blocks(
        attention_mask: Tensor | None, options: Mapping[str, Any], of_tokens: BlockMask | None = None
    ) -> BlockMask | None:
        if attention_mask is None and local_size is None and skips:
            return None

        def compute(queries: range, keys: range, **more: Any) -> Tensor:
            mask: Tensor = sdpa_mask(
                q_length=len(queries), kv_length=len(keys), q_offset=q_offset + queries.start,
                kv_offset=kv_offset + keys.start, attention_mask=attention_mask, allow_is_causal_skip=False,
                **{**options, **more},
            )  # fmt: skip
            return mask

        # Without padding, a mask depends on positions only.
        return BlockMask(compute, partial(compute, device="cpu") if attention_mask is None else None, of_tokens)

    # The same mask without padding and for one row, for flat rows.
    of_tokens = blocks(None, {**options, "batch_size": 1})
    return blocks(None if hides_nothing() else attention_mask, options, of_tokens)


def _notes_of_ring(model: nn.Module, device: torch.device, obstacle: str | None) -> list[str]:
    if obstacle is None:
        return ["attention around a ring runs in the fused kernel"]
    return [f"attention around a ring computes its blocks by operations of torch, because {obstacle}"]


for _name, _mask, _form in (
    (
        HEADS_ATTENTION,
        ALL_MASK_ATTENTION_FUNCTIONS[KEYED_ATTENTION],
        AttentionForm(notes_of_masks, FLAT_HEADS_ATTENTION),
    ),
    (FLAT_HEADS_ATTENTION, lambda *_, **__: None, AttentionForm(notes_of_rows, FLAT_HEADS_ATTENTION)),
    (RING_ATTENTION, _block_mask, AttentionForm(_notes_of_ring, RING_ATTENTION)),
):
    ALL_ATTENTION_FUNCTIONS.register(_name, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_name, _mask)
    FORMS[_name] = _form
