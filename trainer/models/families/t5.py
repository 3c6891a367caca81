"""T5 (Raffel et al. 2020, arXiv:1910.10683) and T5 1.1 with its gated feed-forward; the whole model, or its encoder."""

from __future__ import annotations

from trainer.models.families.family import LayerStack, ModelFamily, StagePlan, TensorPlan
from trainer.models.families.residuals import t5_attention, t5_feed_forward

_LAYERS = "(encoder|decoder).block.*"
_ATTENTION = f"{_LAYERS}.layer.*.(SelfAttention|EncDecAttention)"
_FIRST_LAYER = ("layer.0.SelfAttention.relative_attention_bias", "has_relative_attention_bias")
_FEED_FORWARD = f"{_LAYERS}.layer.*.DenseReluDense"

T5 = ModelFamily(
    "t5",
    layers=_LAYERS,
    tensor=TensorPlan(
        columns={f"{_ATTENTION}.(q|k|v)": 1, f"{_FEED_FORWARD}.(wi|wi_0|wi_1)": 1},
        rows=(f"{_ATTENTION}.o", f"{_FEED_FORWARD}.wo"),
        attention=(_ATTENTION,),
        shared_inputs=(_ATTENTION, _FEED_FORWARD),
        embeddings=("shared", "(encoder|decoder).embed_tokens"),
        # The embedding of relative positions has one feature for each head.
        head_embeddings=(f"{_ATTENTION}.relative_attention_bias",),
        vocabulary_heads=("lm_head",),
        whole=("classifier", "classification_head.(dense|out_proj)", "qa_outputs"),
        heads=("num_heads",),
        divided={_ATTENTION: ("n_heads", "inner_dim")},
        split_dropouts=(f"{_FEED_FORWARD}.dropout",),
        sequence_parallel=True,
    ),
    stages=StagePlan(
        (
            LayerStack(
                "encoder.block.*",
                before=("shared", "encoder.embed_tokens"),
                after=("encoder.final_layer_norm",),
                result="encoder",
                result_as="encoder_outputs",
                num_results=3,
                first_layer=_FIRST_LAYER,
            ),
            LayerStack("decoder.block.*", before=("decoder.embed_tokens",), num_results=3, first_layer=_FIRST_LAYER),
        )
    ),
    residual_outputs={
        "encoder.block.*.layer.0": t5_attention,
        "encoder.block.*.layer.1": t5_feed_forward,
        "decoder.block.*.layer.(0|1)": t5_attention,
        "decoder.block.*.layer.2": t5_feed_forward,
    },
    starts_with_padding=True,
    undeclared_keys=("decoder_start_token_id",),
)
