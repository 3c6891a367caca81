"""Keys of PEFT's `LoraConfig`."""

from __future__ import annotations

from trainer.recipe.foreign.counterpart import Counterpart, alike, mapped, none, renamed

LORA_CONFIG: dict[str, Counterpart] = {
    "r": renamed("model.adapter.rank"),
    "lora_alpha": renamed("model.adapter.alpha"),
    "lora_dropout": renamed("model.adapter.dropout"),
    "target_modules": renamed("model.adapter.targets"),
    "layers_to_transform": mapped("model.adapter.targets", note='patterns with a number, such as "layer.11.*.query"'),
    "rank_pattern": renamed("model.adapter.rank_pattern", note="patterns such as those of `targets`"),
    "alpha_pattern": renamed("model.adapter.alpha_pattern", note="patterns such as those of `targets`"),
    "modules_to_save": renamed("model.adapter.modules_to_save"),
    "trainable_token_indices": renamed("model.adapter.trainable_tokens", note="tokens or their ids"),
    "use_rslora": renamed("model.adapter.rank_stabilised"),
    "use_dora": mapped("model.adapter.type", note='"dora"'),
    "peft_type": mapped("model.adapter.type", note='"lora" or "dora"'),
    "init_lora_weights": mapped("model.adapter.start", note='"pissa", "pissa_niter_16" or "loftq"'),
    "loftq_config": mapped("model.adapter.start", note='"loftq", of one iteration'),
    **alike(none("adapters train no bias"), "lora_bias"),
    "exclude_modules": none("name the other layers in `model.adapter.targets`"),
    "layer_replication": none("layers are not repeated"),
}
"""The rows of a configuration of LoRA, which other tools take their names from."""
