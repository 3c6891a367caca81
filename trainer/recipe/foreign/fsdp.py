"""Keys of `fsdp_config`, which accelerate writes with the prefix `fsdp_` and TrainingArguments without."""

from __future__ import annotations

from trainer.recipe.foreign import remarks as say
from trainer.recipe.foreign import values as convert_by
from trainer.recipe.foreign.counterpart import Counterpart, mapped, none, same

FSDP: dict[str, Counterpart] = {
    "version": same("the strategies fsdp and hsdp are FSDP2 (`fully_shard`)", 2),
    "sharding_strategy": mapped("parallel.strategy", "FULL_SHARD", note=say.STRATEGIES),
    "reshard_after_forward": mapped("parallel.reshard_after_forward", True, "FULL_SHARD"),
    "offload_params": mapped("parallel.offload", False, note=say.OFFLOAD, value=convert_by.switch("parameters")),
    "activation_checkpointing": mapped(
        "activation_checkpointing", False, note=say.RECOMPUTE, value=convert_by.switch("full")
    ),
    "activation_checkpointing_offload": none("kept activations stay on the GPU", False),
    "auto_wrap_policy": none(say.WRAPPED_BY_FAMILY, "TRANSFORMER_BASED_WRAP"),
    "transformer_layer_cls_to_wrap": none(say.WRAPPED_BY_FAMILY, None),
    "min_num_params": none(say.WRAPPED_BY_FAMILY, 0),
    "backward_prefetch": none("FSDP2 always prefetches", None, "BACKWARD_PRE", "NO_PREFETCH"),
    "forward_prefetch": none("FSDP2 always prefetches", False),
    "limit_all_gathers": same("FSDP2 always limits them", True),
    "use_orig_params": same("parameters keep their names and shapes", True),
    "state_dict_type": none(say.OWN_CHECKPOINTS, "FULL_STATE_DICT", "SHARDED_STATE_DICT"),
    "cpu_ram_efficient_loading": same(say.ONE_READER, True, False),
    "sync_module_states": same("all ranks start with the same weights", True, False),
    "ignored_modules": none("the whole model is sharded", None),
}
