"""DistilBERT (Sanh et al. 2019, arXiv:1910.01108)."""

from __future__ import annotations

from trainer.models.families.family import LayerStack, ModelFamily, StagePlan, TensorPlan

_LAYERS = "transformer.layer.*"

DISTILBERT = ModelFamily(
    "distilbert",
    layers=_LAYERS,
    padding_free=True,
    tensor=TensorPlan(
        columns={f"{_LAYERS}.(attention.(q_lin|k_lin|v_lin)|ffn.lin1)": 1},
        rows=(f"{_LAYERS}.attention.out_lin", f"{_LAYERS}.ffn.lin2"),
        attention=(f"{_LAYERS}.attention",),
        shared_inputs=(f"{_LAYERS}.attention",),
        embeddings=("embeddings.word_embeddings",),
        vocabulary_heads=("vocab_projector",),
        whole=("embeddings.position_embeddings", "pre_classifier", "classifier", "vocab_transform", "qa_outputs"),
        heads=("n_heads",),
        sequence_parallel=True,
        context_parallel=True,
    ),
    stages=StagePlan((LayerStack(_LAYERS, before=("embeddings",)),)),
)
