"""ALBERT (Lan et al. 2020, arXiv:1909.11942): a few layers, each called many times."""

from __future__ import annotations

from trainer.models.families.family import ModelFamily, TensorPlan

_LAYERS = "encoder.albert_layer_groups.*.albert_layers.*"

ALBERT = ModelFamily(
    "albert",
    layers=_LAYERS,
    tensor=TensorPlan(
        columns={f"{_LAYERS}.(attention.(query|key|value)|ffn)": 1},
        rows=(f"{_LAYERS}.attention.dense", f"{_LAYERS}.ffn_output"),
        # No shared input: the attention adds its input to its output, so each column sums its own input gradient.
        attention=(f"{_LAYERS}.attention",),
        embeddings=("embeddings.word_embeddings",),
        vocabulary_heads=("predictions.decoder",),
        whole=(
            "embeddings.(position_embeddings|token_type_embeddings)",
            "encoder.embedding_hidden_mapping_in",
            "pooler",
            "classifier",
            "qa_outputs",
            "predictions.dense",
            "sop_classifier.classifier",
        ),
    ),
)
