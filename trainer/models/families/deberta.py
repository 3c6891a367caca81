"""DeBERTa-v2 and v3 (He et al. 2021, arXiv:2006.03654 and arXiv:2111.09543)."""

from __future__ import annotations

from trainer.models.families.family import ModelFamily, TensorPlan
from trainer.models.families.residuals import dense_then_norm

_LAYERS = "encoder.layer.*"
_ATTENTION = f"{_LAYERS}.attention.self"

DEBERTA_V2 = ModelFamily(
    "deberta-v2",
    layers=_LAYERS,
    tensor=TensorPlan(
        # Relative positions use the projections of queries and keys, or their own.
        columns={
            f"{_ATTENTION}.(query_proj|pos_query_proj|key_proj|pos_key_proj|value_proj)": 1,
            f"{_LAYERS}.intermediate.dense": 1,
        },
        rows=(f"{_LAYERS}.attention.output.dense", f"{_LAYERS}.output.dense"),
        # The module computes its attention itself. It has no shared input, because it has two inputs, hidden states and
        # position embeddings; each column sums the gradient of its own input.
        attention=(),
        embeddings=("embeddings.word_embeddings",),
        vocabulary_heads=("cls.predictions.decoder",),
        whole=(
            "embeddings.(position_embeddings|token_type_embeddings|embed_proj)",
            "encoder.rel_embeddings",
            "encoder.conv.conv",
            "pooler.dense",
            "classifier",
            "qa_outputs",
            "cls.predictions.transform.dense",
        ),
        divided={_ATTENTION: ("num_attention_heads", "all_head_size")},
        head_dropouts=(f"{_ATTENTION}.dropout",),
    ),
    shared_dropouts=(f"{_ATTENTION}.pos_dropout", f"{_ATTENTION}.(pos_query_proj|pos_key_proj).lora.dropout"),
    residual_outputs={f"{_LAYERS}.(attention.output|output)": dense_then_norm},
    # With `share_att_key`, these project the hidden states first, and then the embeddings of relative positions.
    shared_second_calls=(f"{_ATTENTION}.(query_proj|key_proj).lora.dropout",),
    shared_products={_ATTENTION: "disentangled_attention_bias"},
)  # fmt: skip
