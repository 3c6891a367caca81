"""GPT-2 (Radford et al. 2019)."""

from __future__ import annotations

from trainer.models.families.family import LayerStack, ModelFamily, StagePlan, TensorPlan

_LAYERS = "h.*"

GPT2 = ModelFamily(
    "gpt2",
    layers=_LAYERS,
    padding_free=True,
    tensor=TensorPlan(
        # `c_attn` has queries, keys and values side by side, and each is cut by itself.
        columns={f"{_LAYERS}.attn.c_attn": 3, f"{_LAYERS}.mlp.c_fc": 1},
        rows=(f"{_LAYERS}.attn.c_proj", f"{_LAYERS}.mlp.c_proj"),
        attention=(f"{_LAYERS}.attn",),
        shared_inputs=(f"{_LAYERS}.attn",),
        embeddings=("wte",),
        vocabulary_heads=("lm_head",),
        whole=("wpe", "score", "classifier", "qa_outputs"),
        heads=("n_head",),
        # `forward` splits the output of `c_attn` by this number of features.
        divided={f"{_LAYERS}.attn": ("split_size",)},
        sequence_parallel=True,
        context_parallel=True,
    ),
    stages=StagePlan((LayerStack(_LAYERS, before=("wte", "wpe")),)),
)
