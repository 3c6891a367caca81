"""Tiny mixtures of experts with losses of routers, and their training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.helpers.training import VOCABULARY, sgd_sections, tiny_recipe, tiny_training, weights_of, whole_state
from trainer.recipe.schema import Recipe

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "num_experts_per_tok": 2,
}
_LATENT = {"q_lora_rank": None, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {**_SIZES, "num_local_experts": 6},
    "qwen2_moe": {
        **_SIZES, "num_experts": 6, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        "decoder_sparse_step": 1,
    },
    "qwen3_moe": {**_SIZES, "num_experts": 6, "moe_intermediate_size": 16, "head_dim": 8},
    "olmoe": {**_SIZES, "num_experts": 6},
    "gpt_oss": {**_SIZES, "num_local_experts": 6, "head_dim": 8, "layer_types": ["full_attention"] * 2},
    "deepseek_v3": {
        **_SIZES, **_LATENT, "num_key_value_heads": 4, "n_routed_experts": 6, "moe_intermediate_size": 16, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "num_hidden_layers": 3,
    },
}  # fmt: skip
LOSSES = {"router_loss": 0.1, "router_z_loss": 0.01}


def recipe_of(kind: str, keys: dict[str, Any], **sections: Any) -> Recipe:
    """Return the recipe of a language model with SGD at learning rate 1 and no clipping."""
    own = {**sgd_sections(), **sections}
    own["training"] = {"max_grad_norm": None, "micro_batch_size": 12, **own.get("training", {})}
    model = {"config": {"model_type": kind, **MODELS[kind]}, "tokenizer": "none", **own.pop("model", {})}
    task = own.pop("task", {"type": "causal_lm", "text": "text", **keys})
    return tiny_recipe(task=task, model=model, **own)


def trained(recipe: Recipe, num_steps: int = 2) -> tuple[list[float], list[float], dict[str, float], dict[str, Tensor]]:
    """Return losses, norms, the numbers of the last step, and weights with buffers. All ranks must call it."""
    with tiny_training(recipe) as training:
        results = training.steps(num_steps)
        tensors = whole_state(training.engine, training.mesh).tensors
        assert weights_of(training.engine, training.mesh)
        kept = {name: t.clone() for name, t in tensors.items() if not name.startswith("optimizer.")}
        return [r.loss for r in results], [r.grad_norm for r in results], dict(results[-1].more()), kept


def assert_equal(found: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    """Compare two results of `trained` within the tolerances of layouts."""
    for own, other, rtol in zip(found[:2], expected[:2], (1e-6, 1e-5), strict=True):
        torch.testing.assert_close(torch.tensor(own), torch.tensor(other), rtol=rtol, atol=0)
    assert found[2].keys() - {"expert_rank_load_max"} == expected[2].keys()
    for name, number in expected[2].items():
        assert abs(found[2][name] - number) <= 2e-5 * max(1.0, abs(number)), name
    for name, tensor in expected[3].items():
        torch.testing.assert_close(
            found[3][name], tensor, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
