"""Decoders with mixtures of experts. Tensor ranks cut attention and shared experts; routers and experts stay whole."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from trainer.features.experts.products import use_products
from trainer.features.experts.vectors import cut_norm, cut_vector
from trainer.models.families.family import LayerStack, ModelFamily, PartCut, StagePlan, TensorPlan

_LAYERS = "layers.*"
_ATTENTION = f"{_LAYERS}.self_attn"
_STAGES = StagePlan((LayerStack(_LAYERS, before=("embed_tokens",)),))


def _plan(
    columns: str,
    rows: str,
    *,
    shared: tuple[str, ...] = (),
    whole: tuple[str, ...] = (),
    in_part: tuple[str, ...] = (),
    parts: Mapping[str, PartCut] = MappingProxyType({}),
    context: bool = True,
) -> TensorPlan:
    """Return a plan with the given columns and rows of layers, in which experts and routers are whole.

    Args:
        shared: modules beside attention that pass their input to several columns.
        in_part: modules of attention that are `partial` in `TensorPlan`.
        parts: see `TensorPlan`; by the ends of names from attention on.
        context: whether layers may have this rank's positions only.
    """
    return TensorPlan(
        columns={f"{_LAYERS}.{columns}": 1},
        rows=(f"{_LAYERS}.{rows}",),
        attention=(_ATTENTION,),
        shared_inputs=(_ATTENTION, *(f"{_LAYERS}.{name}" for name in shared)),
        embeddings=("embed_tokens",),
        vocabulary_heads=("lm_head",),
        whole=("score", "qa_outputs", f"{_LAYERS}.mlp.(gate|router|experts)", *whole),
        partial=tuple(f"{_ATTENTION}.{name}" for name in in_part),
        parts={f"{_ATTENTION}{name}": cut for name, cut in parts.items()},
        heads=("num_attention_heads", "num_key_value_heads"),
        context_parallel=context,
    )


def _watched(built: Any, recipe: Any) -> None:
    from trainer.features.experts.router import watch_routers

    watch_routers(built, recipe)


def _family(model_type: str, tensor: TensorPlan | None, *, padding_free: bool = True) -> ModelFamily:
    return ModelFamily(
        model_type,
        layers=_LAYERS,
        tensor=tensor,
        stages=_STAGES,
        padding_free=padding_free,
        change=use_products,
        prepare=_watched,
    )


_HEADS = "self_attn.(q_proj|k_proj|v_proj)"
_DENSE = f"({_HEADS}|mlp.(gate_proj|up_proj)"  # a layer has experts or a feed-forward, as its configuration says

# Jiang et al. 2024 (arXiv:2401.04088)
MIXTRAL = _family("mixtral", _plan(_HEADS, "self_attn.o_proj"))
# https://qwenlm.github.io/blog/qwen-moe
QWEN2_MOE = _family(
    "qwen2_moe",
    _plan(
        f"{_DENSE}|mlp.shared_expert.(gate_proj|up_proj))",
        "(self_attn.o_proj|mlp.down_proj|mlp.shared_expert.down_proj)",
        shared=("mlp.shared_expert",),
        whole=(f"{_LAYERS}.mlp.shared_expert_gate",),
    ),
)
# Yang et al. 2025 (arXiv:2505.09388); all heads share its norms of queries and keys, which have the width of one head.
QWEN3_MOE = _family(
    "qwen3_moe",
    _plan(f"{_DENSE})", "(self_attn.o_proj|mlp.down_proj)", in_part=("(q_norm|k_norm)",)),
)
# Muennighoff et al. 2024 (arXiv:2409.02060); its norms of queries and keys join all heads.
OLMOE = _family("olmoe", _plan(_HEADS, "self_attn.o_proj", parts={".(q_norm|k_norm)": cut_norm}))
# Agarwal et al. 2025 (arXiv:2508.10925); its attention has a sink for each head.
_SINKS: Mapping[str, PartCut] = {"": partial(cut_vector, "sinks")}
GPT_OSS = _family("gpt_oss", _plan(_HEADS, "self_attn.o_proj", parts=_SINKS, context=False), padding_free=False)
# DeepSeek-AI 2024 (arXiv:2405.04434, arXiv:2412.19437). Each rank has all latent states, and uses them for its heads.
_SHARED = _plan(
    "(self_attn.(q_proj|q_b_proj|kv_b_proj)|mlp.(gate_proj|up_proj|shared_experts.gate_proj|shared_experts.up_proj))",
    "(self_attn.o_proj|mlp.down_proj|mlp.shared_experts.down_proj)",
    shared=("mlp.shared_experts",),
    context=False,  # keys are wider than values
    # Also the products of adapters there.
    in_part=("((q_a_proj|kv_a_proj_with_mqa)(|.lora|.lora.magnitude)|(q|kv)_a_layernorm)",),
)
DEEPSEEK_V2 = _family("deepseek_v2", _SHARED, padding_free=False)  # its rotations are complex numbers
DEEPSEEK_V3 = _family("deepseek_v3", _SHARED)
