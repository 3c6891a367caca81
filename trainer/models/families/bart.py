"""BART (Lewis et al. 2020, arXiv:1910.13461); its layers call torch's dropout as a function."""

from __future__ import annotations

from trainer.models.families.family import LayerStack, ModelFamily, StagePlan, TensorPlan

_LAYERS = "(encoder|decoder).layers.*"
_ATTENTION = f"{_LAYERS}.(self_attn|encoder_attn)"

BART = ModelFamily(
    "bart",
    layers=_LAYERS,
    tensor=TensorPlan(
        columns={f"{_ATTENTION}.(q_proj|k_proj|v_proj)": 1, f"{_LAYERS}.fc1": 1},
        rows=(f"{_ATTENTION}.out_proj", f"{_LAYERS}.fc2"),
        attention=(_ATTENTION,),
        shared_inputs=(_ATTENTION,),
        embeddings=("shared", "(encoder|decoder).embed_tokens"),
        vocabulary_heads=("lm_head",),
        # The model adds this buffer to its logits, which a tensor rank has in part.
        vocabulary_buffers=("final_logits_bias",),
        whole=("(encoder|decoder).embed_positions", "classification_head.(dense|out_proj)", "qa_outputs"),
        heads=("encoder_attention_heads", "decoder_attention_heads"),
        split_dropouts=(f"{_LAYERS}.activation_output_dropout",),
        sequence_parallel=True,
    ),
    stages=StagePlan(
        (
            LayerStack(
                "encoder.layers.*",
                before=(
                    "shared", "encoder.embed_tokens", "encoder.embed_positions", "encoder.layernorm_embedding",
                ),
                result="encoder",
                result_as="encoder_outputs",
            ),
            LayerStack(
                "decoder.layers.*",
                before=("decoder.embed_tokens", "decoder.embed_positions", "decoder.layernorm_embedding"),
            ),
        )
    ),
    called_dropouts={
        "(encoder|decoder)": ("embedding_dropout",),
        "encoder.layers.*": ("self_attn_output_dropout", "activation_output_dropout", "output_dropout"),
        "decoder.layers.*": (
            "self_attn_output_dropout", "encoder_attn_output_dropout", "activation_output_dropout", "output_dropout",
        ),
    },
)  # fmt: skip
