"""Keys of formats that `trainer convert` does not read: it names the format and the counterpart of each key.

The keys of a format are those that decide what it trains, and that no table of a read format has.
"""

from __future__ import annotations

from trainer.recipe.foreign import remarks as say
from trainer.recipe.foreign.counterpart import Counterpart, alike, mapped, none, renamed
from trainer.recipe.foreign.peft import LORA_CONFIG

_QUANTIZED = mapped("model.quantization", note='"nf4" or "nf4_single" for 4 bits, "int8" for 8 bits')
_ONE_NF4 = none(
    "4 bits are NormalFloat in uint8, with scales that are quantised too (nf4) or in fp32 (nf4_single); precision gives"
    " the type of products"
)
_ONE_INT8 = none("8 bits are those of each row of a weight; inputs are not quantised")
_TEMPLATE = none("the chat template of the tokenizer applies; set it in its folder, and name that by model.tokenizer")
_NO_ONLINE = none("online methods are not supported")
_LOSS = mapped("task.loss.type", note='with task.type "preference"')
_SMOOTHING = renamed("task.loss.label_smoothing", note="the probability that a preference is wrong: conservative DPO")
_REFERENCE = none("the reference is the model at the start, or the weights beneath a new adapter; it is computed once")
_DROPOUT = mapped("model.dropout", note="0 for true; the reference has none")
_CUT_PROMPTS = none("a prompt with its answer is cut at its end, by data.max_length")
_DESIRABLE = renamed("task.loss.desirable_weight")
_UNDESIRABLE = renamed("task.loss.undesirable_weight")
_ADAPTER = mapped("model.adapter", note='{"type": "lora"}; without it, all weights are trained')
_TARGETS = mapped("model.adapter.targets", note="names or patterns of modules")
_PACKING = mapped("task.packing", note='"documents" or "joined", with task.type "causal_lm"')
_ROWS = mapped("data.train", note=say.FILES)
_HELD_OUT = mapped("data.validation", note="a share, such as 0.05")
_PISSA = mapped("model.adapter.start", note='"pissa" or "pissa_niter_16"')

_LORA = {name: LORA_CONFIG[name] for name in ("lora_alpha", "lora_dropout")}
_QUANTIZED_BY_BITSANDBYTES: dict[str, Counterpart] = {
    **alike(_QUANTIZED, "load_in_4bit load_in_8bit"),
    **alike(
        _ONE_NF4,
        "bnb_4bit_quant_type bnb_4bit_use_double_quant bnb_4bit_compute_dtype bnb_4bit_quant_storage",
    ),
    **alike(_ONE_INT8, "llm_int8_threshold llm_int8_has_fp16_weight llm_int8_skip_modules"),
}
_LORA_OF_PEFT: dict[str, Counterpart] = {
    **_LORA,
    "lora_r": renamed("model.adapter.rank"),
    "lora_target_modules": _TARGETS,
    **_QUANTIZED_BY_BITSANDBYTES,
}

_LLAMA_FACTORY: dict[str, Counterpart] = {
    "stage": mapped(
        "task.type", note='"causal_lm" for pt and sft, "preference" for dpo and kto, "reward_model" for rm'
    ),
    "finetuning_type": _ADAPTER,
    **_LORA,
    "lora_rank": renamed("model.adapter.rank"),
    "lora_target": _TARGETS,
    "additional_target": mapped("model.adapter.modules_to_save"),
    **{name: LORA_CONFIG[name] for name in ("use_dora", "use_rslora")},
    **alike(_PISSA, "pissa_init pissa_iter"),
    "loraplus_lr_ratio": none("both factors of a product have one rate"),
    **alike(
        mapped("model.freeze", note="names or patterns of what is not trained"),
        "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules",
    ),
    "quantization_bit": _QUANTIZED,
    "quantization_method": none("bitsandbytes quantises"),
    "double_quantization": _ONE_NF4,
    "quantization_type": _ONE_NF4,
    "adapter_name_or_path": none("training goes on from whole models only"),
    **alike(_TEMPLATE, "template default_system"),
    **alike(_ROWS, "dataset dataset_dir"),
    "add_tokens": mapped("model.new_tokens", note="a list"),
    "resize_vocab": none("`model.new_tokens` enlarges the embedding where it must"),
    "cutoff_len": renamed("data.max_length"),
    "val_size": _HELD_OUT,
    **alike(_PACKING, "packing neat_packing"),
    "mask_history": mapped("task.train_on", note='"last"'),
    "train_on_prompt": none("prompts are not trained"),
    "pref_loss": _LOSS,
    "pref_beta": mapped("task.loss.beta"),
    "dpo_label_smoothing": _SMOOTHING,
    "simpo_gamma": mapped("task.loss.gamma", note="a margin of rewards, with beta"),
    "kto_chosen_weight": _DESIRABLE,
    "kto_rejected_weight": _UNDESIRABLE,
    **alike(_REFERENCE, "ref_model ref_model_adapters ref_model_quantization_bit"),
    "pref_ftx": none("a loss of likelihood beside preferences is that of the loss orpo"),
    **alike(none("the optimizers are those of optimizer.name"), "use_galore use_apollo use_badam"),
}

_AXOLOTL: dict[str, Counterpart] = {
    "base_model": mapped("model.name_or_path"),
    "tokenizer_config": mapped("model.tokenizer"),
    "tokens": renamed("model.new_tokens"),
    "special_tokens": none("the tokenizer's folder has its special tokens; name it by model.tokenizer"),
    "adapter": _ADAPTER,
    **_LORA_OF_PEFT,
    "lora_target_linear": mapped("model.adapter.targets", note='"all-linear"'),
    "lora_modules_to_save": LORA_CONFIG["modules_to_save"],
    "peft_use_dora": LORA_CONFIG["use_dora"],
    "peft_use_rslora": LORA_CONFIG["use_rslora"],
    "peft_init_lora_weights": LORA_CONFIG["init_lora_weights"],
    "unfrozen_parameters": mapped("model.freeze", note="names or patterns of what is not trained"),
    "datasets": _ROWS,
    "val_set_size": _HELD_OUT,
    "sequence_len": renamed("data.max_length"),
    "dataset_prepared_path": mapped("data.cache"),
    **alike(_TEMPLATE, "chat_template chat_template_jinja"),
    "sample_packing": _PACKING,
    "train_on_inputs": none("prompts are not trained"),
    "micro_batch_size": renamed("training.micro_batch_size", note=say.STEP_TOTAL),
    "lr_scheduler": mapped("schedule.name"),
    "cosine_min_lr_ratio": renamed("schedule.min_rate"),
    **alike(mapped("optimizer.groups", note="patterns with a rate of their own"), "lr_groups embedding_lr"),
    "rl": _LOSS,
    "rl_beta": mapped("task.loss.beta"),
    "dpo_label_smoothing": _SMOOTHING,
    "simpo_gamma": mapped("task.loss.gamma", note="a margin of rewards, with beta"),
    "kto_desirable_weight": _DESIRABLE,
    "kto_undesirable_weight": _UNDESIRABLE,
    "precompute_ref_log_probs": _REFERENCE,
    "reward_model": mapped("task.type", note='"reward_model"'),
    "center_rewards_coefficient": renamed("task.center_coefficient"),
    "wandb_project": renamed("logging.project"),
}

_TRL: dict[str, Counterpart] = {
    "use_peft": _ADAPTER,
    **_LORA_OF_PEFT,
    **{name: LORA_CONFIG[name] for name in ("use_dora", "use_rslora")},
    "lora_modules_to_save": LORA_CONFIG["modules_to_save"],
    "packing": _PACKING,
    "max_length": renamed("data.max_length"),
    "dataset_text_field": mapped("task.text"),
    "assistant_only_loss": mapped("task.messages", note="only the assistant's turns are trained"),
    "completion_only_loss": mapped("task.completion", note="prompts are not trained"),
    "chat_template_path": _TEMPLATE,
    "dataset_num_proc": renamed("data.preparation_processes"),
    "loss_type": _LOSS,
    "beta": mapped("task.loss.beta"),
    "simpo_gamma": renamed("task.loss.gamma"),
    "desirable_weight": _DESIRABLE,
    "undesirable_weight": _UNDESIRABLE,
    "disable_dropout": _DROPOUT,
    **alike(_CUT_PROMPTS, "max_prompt_length truncation_mode"),
    **alike(_REFERENCE, "precompute_ref_log_probs precompute_ref_batch_size sync_ref_model ref_model_init_kwargs"),
    "center_rewards_coefficient": renamed("task.center_coefficient"),
    **alike(_NO_ONLINE, "num_generations reward_funcs"),
}

FORMATS: dict[str, dict[str, Counterpart]] = {"LLaMA-Factory": _LLAMA_FACTORY, "axolotl": _AXOLOTL, "TRL": _TRL}
"""The tables by the name of the tool."""
