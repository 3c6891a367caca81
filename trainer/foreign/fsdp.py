"""The keys of `fsdp_config`: accelerate writes them with the prefix `fsdp_`, TrainingArguments without."""

from __future__ import annotations

from trainer.foreign import remarks as say
from trainer.foreign.counterpart import Counterpart, mapped, none, same

FSDP: dict[str, Counterpart] = {
    "version": same("the strategies fsdp and hsdp are FSDP2 (`fully_shard`)", 2),
    "sharding_strategy": mapped("parallel.strategy", "FULL_SHARD", note=say.STRATEGIES),
    "reshard_after_forward": mapped("parallel.reshard_after_forward", True, "FULL_SHARD"),
    "offload_params": mapped("parallel.offload", False, note=say.OFFLOAD),
    "activation_checkpointing": mapped("activation_checkpointing", False, note=say.RECOMPUTE),
    "activation_checkpointing_offload": none("what is kept stays on the GPU", False),
    "auto_wrap_policy": none(say.WRAPPED_BY_FAMILY, "TRANSFORMER_BASED_WRAP"),
    "transformer_layer_cls_to_wrap": none(say.WRAPPED_BY_FAMILY, None),
    "min_num_params": none(say.WRAPPED_BY_FAMILY, 0),
    "backward_prefetch": none("FSDP2 prefetches by itself", None, "BACKWARD_PRE", "NO_PREFETCH"),
    "forward_prefetch": none("FSDP2 prefetches by itself", False),
    "limit_all_gathers": same("FSDP2 limits them by itself", True),
    "use_orig_params": same("parameters keep their names and shapes", True),
    "state_dict_type": none(say.OWN_CHECKPOINTS, "FULL_STATE_DICT", "SHARDED_STATE_DICT"),
    "cpu_ram_efficient_loading": same("each rank reads only its part of the weights", True, False),
    "sync_module_states": same("all ranks begin with the same weights", True, False),
    "ignored_modules": none("the whole model is sharded", None),
}
