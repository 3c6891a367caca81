"""Blocks with shared experts, which compute these while tokens travel to the ranks with their experts.

Only the order of the work differs from that of transformers. In DeepSeek no digit changes; in Qwen2-MoE, autograd adds
the gradients of a block's input in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from trainer.features.experts.products import BESIDE
from trainer.models.forward_context import replace_forward


def overlap_shared(block: nn.Module, model_type: str) -> None:
    """Let a block with divided experts compute its shared ones beside the messages, if its family has any."""
    if model_type in _FORWARDS:
        replace_forward(block, _FORWARDS[model_type])


def _beside(experts: Any, shared: Callable[[], Tensor], *tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of experts for `tokens`, and those of `shared`, called while the tokens are under way."""
    outputs: list[Tensor] = []
    setattr(experts, BESIDE, lambda: outputs.append(shared()))
    try:
        # Experts are called as a module, for which a strategy gathers their weights.
        return experts(*tokens), outputs[0]
    finally:
        delattr(experts, BESIDE)


def _deepseek(self: Any, hidden_states: Tensor) -> Tensor:
    shape = hidden_states.shape
    _, weights, index = self.gate(hidden_states)
    tokens = hidden_states.view(-1, shape[-1])
    routed, shared = _beside(self.experts, lambda: self.shared_experts(hidden_states), tokens, index, weights)
    return routed.view(shape) + shared


def _qwen2(self: Any, hidden_states: Tensor) -> Tensor:
    shape = hidden_states.shape
    tokens = hidden_states.view(-1, shape[-1])
    _, weights, index = self.gate(tokens)
    routed, shared = _beside(self.experts, lambda: self.shared_expert(tokens), tokens, index, weights)
    shared = F.sigmoid(cast(Tensor, self.shared_expert_gate(tokens))) * shared
    return (routed + shared).reshape(shape)


_FORWARDS: Mapping[str, Callable[[Any, Tensor], Tensor]] = {
    "qwen2_moe": _qwen2,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}
