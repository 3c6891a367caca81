"""Llama (Touvron et al. 2023, arXiv:2302.13971) and decoders with the same modules."""

from __future__ import annotations

from trainer.models.families.family import LayerStack, ModelFamily, StagePlan, TensorPlan

_LAYERS = "layers.*"


def _like_llama(model_type: str, *, partial: tuple[str, ...] = ()) -> ModelFamily:
    return ModelFamily(
        model_type,
        layers=_LAYERS,
        padding_free=True,
        tensor=TensorPlan(
            columns={f"{_LAYERS}.(self_attn.(q_proj|k_proj|v_proj)|mlp.(gate_proj|up_proj))": 1},
            rows=(f"{_LAYERS}.self_attn.o_proj", f"{_LAYERS}.mlp.down_proj"),
            attention=(f"{_LAYERS}.self_attn",),
            shared_inputs=(f"{_LAYERS}.self_attn", f"{_LAYERS}.mlp"),
            embeddings=("embed_tokens",),
            vocabulary_heads=("lm_head",),
            whole=("score", "qa_outputs"),
            partial=partial,
            heads=("num_attention_heads", "num_key_value_heads"),
            sequence_parallel=True,
            context_parallel=True,
        ),
        stages=StagePlan((LayerStack(_LAYERS, before=("embed_tokens",)),)),
    )


LLAMA = _like_llama("llama")
MISTRAL = _like_llama("mistral")  # Jiang et al. 2023 (arXiv:2310.06825)
QWEN2 = _like_llama("qwen2")  # Yang et al. 2024 (arXiv:2407.10671)
# Yang et al. 2025 (arXiv:2505.09388); all heads share its norms of queries and keys, which have the width of one head.
QWEN3 = _like_llama("qwen3", partial=(f"{_LAYERS}.self_attn.(q_norm|k_norm)",))
