"""Forward functions of modules that drop and add a residual, in which the dropout adds it: on a GPU, in one kernel.

They are as those of transformers otherwise. DistilBERT, BART, GPT-2 and ViT add in another module than they drop, or
in the forward function of a whole layer, which would be repeated here.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def dense_then_norm(module: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
    """Return the output of BERT's attention or feed-forward network, normalised after the addition."""
    output: Tensor = module.LayerNorm(module.dropout(module.dense(hidden_states), input_tensor))
    return output


def t5_feed_forward(module: Any, hidden_states: Tensor) -> Tensor:
    """Return the output of T5's feed-forward network."""
    output: Tensor = module.dropout(module.DenseReluDense(module.layer_norm(hidden_states)), hidden_states)
    return output


def t5_attention(
    module: Any, hidden_states: Tensor, *, attention_mask: Tensor | None = None, **inputs: Any
) -> tuple[Any, ...]:
    """Return the outputs of T5's attention to the own states, or to those of the encoder."""
    attention = module.EncDecAttention if hasattr(module, "EncDecAttention") else module.SelfAttention
    output, *others = attention(module.layer_norm(hidden_states), mask=attention_mask, **inputs)
    return module.dropout(output, hidden_states), *others
