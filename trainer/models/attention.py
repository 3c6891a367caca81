"""Attention function of transformers' models under layout-invariant dropout.

It is registered with transformers under `KEYED_ATTENTION`. Without dropout (evaluation, or probability 0), it calls
transformers' SDPA. With dropout, it materialises the probabilities and applies the keyed mask to them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainer.base.errors import UsageError
from trainer.models.dropout import site_of
from trainer.parallel.dropout import REMEDY
from trainer.parallel.dtypes import at_least_fp32

KEYED_ATTENTION = "trainer_keyed"
_VARIANTS = ("softcap", "s_aux", "cache")  # arguments that change the formula


def _masked_scores(
    scores: Tensor, attention_mask: Tensor | None, position_bias: Tensor | None, is_causal: bool
) -> Tensor:
    """Return the scores `[batch, heads, queries, keys]` with bias and mask; a boolean mask is True at visible keys."""
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is None and is_causal and scores.shape[-2] > 1:
        attention_mask = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attention_mask is None:
        return scores
    if attention_mask.dtype == torch.bool:
        # An added mask needs no work in the backward pass. The lowest finite number absorbs every score, and it makes
        # the probabilities of a fully masked row uniform instead of NaN.
        lowest = torch.finfo(scores.dtype).min
        attention_mask = scores.new_zeros(attention_mask.shape).masked_fill_(attention_mask.logical_not(), lowest)
    return scores + attention_mask


def keyed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute scaled dot-product attention with a dropout mask that does not depend on the layout.

    Args:
        module: the calling attention module, which holds its dropout site.
        query: the queries `[batch, heads, queries, head_dim]`.
        key: the keys `[batch, key_value_heads, keys, head_dim]`.
        value: the values `[batch, key_value_heads, keys, head_dim]`.
        attention_mask: a boolean mask (True: visible) or an additive mask, broadcastable to
            `[batch, heads, queries, keys]`, or None.
        dropout: the dropout probability of the attention probabilities; 0 outside training.
        scaling: the factor of the scores; None means `head_dim ** -0.5`.
        is_causal: whether a missing mask means a causal mask; None takes the module's value.
        position_bias: the bias that is added to the scores (T5), or None.

    Returns:
        The output `[batch, queries, heads, head_dim]`, and the probabilities before dropout (None from SDPA).

    Raises:
        UsageError: the model needs a variant of attention that has no keyed form.
    """
    if dropout == 0.0:
        output: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask,
            dropout=0.0, scaling=scaling, is_causal=is_causal, position_bias=position_bias, **kwargs,
        )  # fmt: skip
        return output
    if variant := next((name for name in _VARIANTS if kwargs.get(name) is not None), None):
        raise UsageError(f"this model's attention uses {variant}, which has no keyed form; {REMEDY}")
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scores = torch.matmul(query, key.transpose(2, 3)) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    scores = _masked_scores(at_least_fp32(scores), attention_mask, position_bias, causal)
    probabilities = torch.softmax(scores, dim=-1).to(value.dtype)
    dropped = site_of(module).drop(probabilities, dropout)
    return torch.matmul(dropped, value).transpose(1, 2).contiguous(), probabilities


ALL_ATTENTION_FUNCTIONS.register(KEYED_ATTENTION, keyed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(KEYED_ATTENTION, sdpa_mask)
