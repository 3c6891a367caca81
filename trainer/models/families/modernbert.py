"""ModernBERT (Warner et al. 2024, arXiv:2412.13663)."""

from __future__ import annotations

from trainer.models.families.family import LayerStack, ModelFamily, StagePlan, TensorPlan

_LAYERS = "layers.*"

MODERNBERT = ModelFamily(
    "modernbert",
    layers=_LAYERS,
    padding_free=True,
    tensor=TensorPlan(
        columns={f"{_LAYERS}.attn.Wqkv": 3, f"{_LAYERS}.mlp.Wi": 2},  # Wi: input and gate
        rows=(f"{_LAYERS}.attn.Wo", f"{_LAYERS}.mlp.Wo"),
        attention=(f"{_LAYERS}.attn",),
        shared_inputs=(f"{_LAYERS}.attn",),
        embeddings=("embeddings.tok_embeddings",),
        vocabulary_heads=("decoder",),
        whole=("head.dense", "classifier", "qa_outputs"),
        split_dropouts=(f"{_LAYERS}.mlp.drop",),
        sequence_parallel=True,
        context_parallel=True,
    ),
    stages=StagePlan((LayerStack(_LAYERS, before=("embeddings",)),)),
)
