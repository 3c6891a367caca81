"""For every family, the smallest model that can be sharded over four ranks, with any of its heads."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig

from trainer.models.attention import KEYED_ATTENTION
from trainer.models.dropout import key_dropout, set_probabilities
from trainer.parallel.dropout import DropoutKeys

VOCABULARY, ROWS, LENGTH, LABELS = 211, 3, 7, 3  # the vocabulary is prime: no number of ranks divides it
_COMMON = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_ENCODER = {**_COMMON, "intermediate_size": 64, "max_position_embeddings": 32}
_DECODER = {**_ENCODER, "num_key_value_heads": 2, "pad_token_id": 0}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": _ENCODER,
    "roberta": _ENCODER,
    "xlm-roberta": _ENCODER,
    "electra": {**_ENCODER, "embedding_size": 16},
    "albert": {**_ENCODER, "embedding_size": 16},
    # as in DeBERTa v3, positions share the projections of queries and keys
    "deberta-v2": {
        **_ENCODER, "relative_attention": True, "share_att_key": True, "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 4, "norm_rel_ebd": "layer_norm", "position_biased_input": False, "type_vocab_size": 0,
    },
    "distilbert": {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    "modernbert": {
        **_ENCODER, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
        "local_attention": 4, "attention_dropout": 0.0,
    },
    "gpt2": {
        "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },
    "llama": _DECODER,
    "mistral": _DECODER,
    "qwen2": {**_DECODER, "tie_word_embeddings": True},
    "qwen3": {**_DECODER, "head_dim": 8},
    "t5": {
        "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
        "relative_attention_num_buckets": 8, "relative_attention_max_distance": 6, "pad_token_id": 0,
        "eos_token_id": 1, "decoder_start_token_id": 0,
    },
    "bart": {
        "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
        "scale_embedding": True, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1, "decoder_start_token_id": 1,
        "forced_eos_token_id": None,
    },
    "vit": {**_COMMON, "intermediate_size": 64, "image_size": 16, "patch_size": 8},
}  # fmt: skip
_SPARSE = {**_DECODER, "head_dim": 8, "num_experts_per_tok": 2, "bos_token_id": 1, "eos_token_id": 2}
_LATENT = {
    **_DECODER, "num_key_value_heads": 4, "num_experts_per_tok": 2, "bos_token_id": 1, "eos_token_id": 2,
    "moe_intermediate_size": 24, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 2,
    "topk_group": 1,
}  # fmt: skip
# Mixtures of experts, which `tests/features/experts/` compares.
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {**_SPARSE, "num_local_experts": 4},
    "qwen2_moe": {
        **_SPARSE, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "num_experts": 4,
    },
    "qwen3_moe": {**_SPARSE, "moe_intermediate_size": 24, "num_experts": 4, "norm_topk_prob": True},
    "olmoe": {**_SPARSE, "num_experts": 4},
    "gpt_oss": {**_SPARSE, "num_local_experts": 4, "sliding_window": 4},
    "deepseek_v2": {**_LATENT, "topk_method": "greedy", "norm_topk_prob": False},
    "deepseek_v3": _LATENT,
}  # fmt: skip
# Families without a table in trainer, for which transformers ships a tensor-parallel plan.
SHIPPED: dict[str, dict[str, Any]] = {
    "olmo": _DECODER,
    "starcoder2": _DECODER,  # biases, and a feed-forward without a gate
    "eurobert": {**_DECODER, "num_key_value_heads": 4},
    "exaone4": {**_DECODER, "head_dim": 8},  # query and key norms of the size of one head
}
# Also shipped: embeddings multiply by a factor. The fuzz does not draw them; keyed attention has no softcap.
SCALED: dict[str, dict[str, Any]] = {
    "gemma": {**_DECODER, "head_dim": 8},
    "gemma2": {**_DECODER, "head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": None},
    "gemma3_text": {**_DECODER, "head_dim": 8, "sliding_window": 4},
}
# The same families with other modules: the keys that differ from `CONFIGS`.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    # the large sizes of DeBERTa v2
    "positions with projections of their own": ("deberta-v2", {
        "share_att_key": False, "embedding_size": 16, "conv_kernel_size": 3, "position_biased_input": True,
        "type_vocab_size": 2,
    }),
    "T5 1.1": ("t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "two groups of two layers": ("albert", {"num_hidden_groups": 2, "inner_group_num": 2}),
}  # fmt: skip
HEADS = (
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
    "AutoModelForMultipleChoice",
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForImageClassification",
)
_DECODERS = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "olmo", "starcoder2", "exaone4", *SCALED, *EXPERTS)
# Families that lie over ranks as another one does: `test_tensor_split` compares their outputs and gradients each time.
NEAR_FAMILIES = ("roberta", "xlm-roberta", "electra", "distilbert", "mistral", "qwen2")


def has_head(model_type: str, head: str) -> bool:
    if head == "AutoModelForCausalLM" and model_type not in _DECODERS:
        return False  # transformers maps encoders to this head too
    names = getattr(transformers, head)._model_mapping._model_mapping
    return model_type in names  # the mapping of classes would import every family of transformers in each rank


def build(model_type: str, head: str, dropout: float, keys: DropoutKeys, variant: str = "") -> nn.Module:
    """Build a model with the same weights at every call. The head's weights are large enough to affect the output."""
    changed = VARIANTS[variant][1] if variant else {}
    config = AutoConfig.for_model(model_type, **((CONFIGS | SHIPPED | SCALED)[model_type] | changed), num_labels=LABELS)
    if head == "AutoModelForQuestionAnswering":
        config.num_labels = 2
    probabilities = [key for key in config.to_dict() if "drop" in key and isinstance(getattr(config, key), float)]
    if probabilities:
        set_probabilities(config, dropout)
    torch.manual_seed(0)
    model = getattr(transformers, head).from_config(config, attn_implementation=KEYED_ATTENTION)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, 1.0 if name.endswith("norm.weight") or "LayerNorm.weight" in name else 0.0, 0.2)
    key_dropout(model, keys)
    return model.train()


def inputs_of(model_type: str, head: str = "") -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(1)
    if model_type == "vit":
        return {"pixel_values": torch.randn(ROWS, 3, 16, 16, generator=random)}
    ids = torch.randint(5, VOCABULARY, (ROWS, LENGTH), generator=random)
    ids[0, 4:] = 0
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    if model_type in ("t5", "bart"):
        ids[:, 3] = 1  # end of sequence: encoder-decoders classify from its hidden state
    if head == "AutoModelForMultipleChoice":
        return {name: tensor.unsqueeze(1) for name, tensor in inputs.items()}
    return inputs | ({"decoder_input_ids": ids.flip(0)} if head == "AutoModelForSeq2SeqLM" else {})
