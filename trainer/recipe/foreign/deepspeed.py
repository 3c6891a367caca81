"""Keys of a DeepSpeed JSON; a dot descends into a section.

A test compares the names with the keys that the pinned version of DeepSpeed reads.
"""

from __future__ import annotations

from functools import partial

from trainer.recipe.deepspeed_keys import FREE_KEYS, FREE_ZERO_KEYS
from trainer.recipe.foreign import remarks as say
from trainer.recipe.foreign import values as convert_by
from trainer.recipe.foreign.counterpart import Counterpart, alike, mapped, none, prefixed, refused, renamed, same

_REMOVED = none("DeepSpeed has removed this key")
_DEFAULT = "DeepSpeed's default applies"
_RECOMPUTE = "these keys configure DeepSpeed's own function, not the model; see activation_checkpointing"
_NO_ZERO_PLUS = "ZeRO++ is not supported: weights and gradients are sent unquantized"
_MASTER_WEIGHTS = "master weights are fp32"


def _passed_on(prefix: str, names: tuple[str, ...]) -> dict[str, Counterpart]:
    """Return the rows of keys that `parallel.deepspeed` passes to DeepSpeed."""
    return {
        f"{prefix}{name}": mapped(f"parallel.deepspeed.{prefix}{name}", note="under zero1 to zero3")
        for name in names
        if name != "zero_optimization"
    }


_offloaded = partial(mapped, "parallel.offload", note=say.OFFLOAD)

_OFFLOAD: dict[str, Counterpart] = {
    "pin_memory": none("DeepSpeed decides on pinning", True),
    "nvme_path": none(say.NO_NVME, None),
    "buffer_count": none(say.NO_NVME, 4, 5),
    "buffer_size": none(say.NO_NVME, 100_000_000),
    "max_in_cpu": none(say.NO_NVME, 1_000_000_000),
    **alike(none(say.NO_NVME, False), "pipeline_read pipeline_write fast_init"),
    "ratio": none("the whole optimizer state is offloaded, or none of it", 1.0),
    "super_offload": none(say.PLAIN_OFFLOAD, False),
    "cpuadam_cores_perc": none(say.PLAIN_OFFLOAD, 0.8),
}

_ZERO: dict[str, Counterpart] = {
    "stage": mapped("parallel.strategy", 0, note=say.STRATEGIES),
    **alike(_offloaded(None), "offload_optimizer offload_param"),
    "offload_optimizer.device": _offloaded("none", None, value=convert_by.device("optimizer")),
    "offload_param.device": _offloaded("none", None, value=convert_by.device("parameters")),
    **prefixed("offload_optimizer.", _OFFLOAD),
    **prefixed("offload_param.", _OFFLOAD),
    "cpu_offload": _offloaded(None, False, value=convert_by.switch("optimizer")),
    **alike(_offloaded(None, False, value=convert_by.switch("parameters")), "cpu_offload_param cpu_offload_params"),
    "cpu_offload_use_pin_memory": none("DeepSpeed decides on pinning", None),
    "compute_grad_norm": same("every step shows the gradient norm", True),
    **alike(none(say.OWN_CHECKPOINTS, False), "elastic_checkpoint pipeline_loading_checkpoint"),
    "zenflow": none(say.PLAIN_OFFLOAD, None),
    "leaf_module": none("no model family has experts"),
    **alike(
        same(say.WHOLE_MODEL),
        "gather_16bit_weights_on_model_save stage3_gather_16bit_weights_on_model_save "
        "stage3_gather_fp16_weights_on_model_save",
    ),
    **alike(
        none(_DEFAULT, False),
        "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential legacy_stage1 "
        "parameter_alignment enable_sanity_checks",
    ),
    "override_module_apply": none(_DEFAULT, True),
    "stage3_module_granularity_threshold": none(_DEFAULT, 0),
    "round_robin_gradients": none("DeepSpeed's partitions keep the order of the parameters", False),
    "load_from_fp32_weights": none(say.OWN_CHECKPOINTS, True),
    "ignore_unused_parameters": none("every parameter must take part in every step", True),
    "zero_hpz_partition_size": none(_NO_ZERO_PLUS, 1),
    **alike(none(_NO_ZERO_PLUS), "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients"),
    "memory_efficient_linear": none("it follows from activation_checkpointing", True),
    "save_muon_momentum_buffer_in_memory": none("Muon is not supported", False),
    **alike(_REMOVED, "mics_shard_size mics_hierarchical_params_gather zeropp_loco_param"),
}

_OPTIMIZER: dict[str, Counterpart] = {
    "optimizer": mapped("optimizer"),
    "optimizer.type": mapped("optimizer.name", value=convert_by.optimizer_of_deepspeed),
    "optimizer.legacy_fusion": none("the optimizer is torch's own", False),
    "optimizer.params": mapped("optimizer"),
    "optimizer.params.lr": renamed("optimizer.learning_rate"),
    "optimizer.params.betas": renamed("optimizer.betas"),
    "optimizer.params.eps": renamed("optimizer.epsilon"),
    "optimizer.params.weight_decay": renamed("optimizer.weight_decay"),
    "optimizer.params.momentum": renamed("optimizer.momentum", note="of sgd"),
    "optimizer.params.torch_adam": same("the optimizer is torch's own, fused", False, True),
    "optimizer.params.adam_w_mode": none("weight decay is decoupled, as in AdamW", True),
    "optimizer.params.bias_correction": same(say.ALWAYS_ON, True),
    "optimizer.params.amsgrad": refused("AMSGrad is not supported", False),
    "optimizer.params.max_grad_norm": none("DeepSpeed ignores it; use training.max_grad_norm", 0, 0.0),
}

_SCHEDULER: dict[str, Counterpart] = {
    **alike(mapped("schedule"), "scheduler scheduler.params"),
    "scheduler.type": mapped("schedule.name", note="WarmupDecayLR is linear, WarmupCosineLR is cosine"),
    "scheduler.params.warmup_num_steps": mapped("schedule.warmup", 1000, note=say.WHOLE_STEPS),
    "scheduler.params.total_num_steps": mapped("training.max_steps"),
    "scheduler.params.warmup_max_lr": mapped("optimizer.learning_rate"),
    **alike(
        none("the warmup starts near 0", 0, 0.0), "scheduler.params.warmup_min_lr scheduler.params.warmup_min_ratio"
    ),
    "scheduler.params.warmup_type": none('the warmup is linear; DeepSpeed\'s default is "log"', "linear"),
    "scheduler.params.cos_min_ratio": mapped("schedule.min_rate", 0.0001),
    "scheduler.params.last_batch_iteration": none("a resumed run continues at its last step", -1),
}

_PRECISION: dict[str, Counterpart] = {
    **alike(mapped("precision", note=say.WORD_OF_PRECISION), "fp16 bf16 bfloat16 torch_autocast"),
    **alike(
        mapped("precision", False, note=say.WORD_OF_PRECISION),
        "fp16.enabled bf16.enabled bfloat16.enabled torch_autocast.enabled",
    ),
    "fp16.auto_cast": none("matrix products are in that type, weights in fp32", False),
    "fp16.loss_scale": none(say.OWN_LOSS_SCALE, 0, 0.0),
    "fp16.initial_scale_power": none(say.OWN_LOSS_SCALE, 16),
    "fp16.loss_scale_window": none(say.OWN_LOSS_SCALE, 1000),
    "fp16.hysteresis": none(say.OWN_LOSS_SCALE, 2),
    "fp16.consecutive_hysteresis": none(say.OWN_LOSS_SCALE, False),
    "fp16.min_loss_scale": none(say.OWN_LOSS_SCALE, 1),
    "fp16.fp16_master_weights_and_grads": none(_MASTER_WEIGHTS, False),
    "bf16.immediate_grad_update": none("gradients are fp32", False, True),
    "bf16.check_grad_overflow": none("the run ends at a non-finite loss or norm, or skips the step", True),
    "bf16.bf16_master_weights_and_grads": none("see weights: bf16 with compensated or random rounding", False),
    "bf16.bf16_optimizer_states": none(say.FP32_STATE, False),
    "torch_autocast.dtype": mapped("precision", None, note=say.WORD_OF_PRECISION),
    "torch_autocast.lower_precision_safe_modules": none("torch's list of operations for autocast applies", None),
}

_LOGS: dict[str, Counterpart] = {
    "steps_per_print": mapped("logging.every", None, note=say.INTERVAL),
    **{
        f"{section}{key}": mapped("logging.to", *defaults, note=f'a list with "{name}"')
        for section, name in (("tensorboard", "tensorboard"), ("wandb", "wandb"), ("csv_monitor", "csv"))
        for key, defaults in (("", ()), (".enabled", (False,)))
    },
    **alike(
        none("logs are in checkpoint.folder, under the name of the run"),
        "tensorboard.output_path tensorboard.job_name csv_monitor.output_path csv_monitor.job_name",
    ),
    **alike(none("set it by the environment variables of W&B"), "wandb.group wandb.team"),
    "wandb.project": mapped("logging.project", "deepspeed"),
    "comet": none("Comet is not supported; see logging.to"),
}

DEEPSPEED: dict[str, Counterpart] = {
    **_passed_on("", FREE_KEYS),
    "train_batch_size": renamed("training.global_batch_size"),
    "train_micro_batch_size_per_gpu": renamed("training.micro_batch_size"),
    "gradient_accumulation_steps": none(say.ACCUMULATION, None),
    "managed_gradient_accumulation": none("the trainer marks the last microbatch of a step", True),
    "gradient_clipping": mapped(
        "training.max_grad_norm", 1.0, note=say.NO_CLIPPING, value=convert_by.unless_auto(convert_by.above_zero)
    ),
    **_OPTIMIZER,
    **_SCHEDULER,
    **_PRECISION,
    "zero_optimization": mapped("parallel.strategy", note=say.STRATEGIES),
    **_passed_on("zero_optimization.", FREE_ZERO_KEYS),
    **prefixed("zero_optimization.", _ZERO),
    **_LOGS,
    "zero_allow_untested_optimizer": same("the optimizer is torch's own", False, True),
    "zero_force_ds_cpu_optimizer": none("the optimizer is torch's own, also with offload", True, False),
    "prescale_gradients": none(say.ONE_DENOMINATOR, False),
    "gradient_predivide_factor": none(say.ONE_DENOMINATOR, 1.0),
    "gradient_allreduce_op": refused(say.ONE_DENOMINATOR, "mean"),
    "aio": none(say.NO_NVME, None),
    "data_types": none("gradients are accumulated in fp32", None),
    "disable_allgather": none("DeepSpeed ignores it", False),
    "communication_data_type": renamed(
        "parallel.communication.gradients", None, "fp32", note="by default fp32, in every precision"
    ),
    "seq_parallel_communication_data_type": none("the heads travel in the type of `precision`", "fp32"),
    "sequence_parallel_size": mapped("parallel.context", 1, note=say.EXCHANGES_HEADS, value=convert_by.positive),
    "disable_python_gc": none("Python's garbage collection stays on", False),
    "wall_clock_breakdown": none("`metrics.jsonl` has the time of every step", False),
    "activation_checkpointing": none(_RECOMPUTE),
    **alike(
        none(_RECOMPUTE, False),
        "activation_checkpointing.partition_activations "
        "activation_checkpointing.contiguous_memory_optimization "
        "activation_checkpointing.synchronize_checkpoint_boundary activation_checkpointing.profile "
        "activation_checkpointing.cpu_checkpointing",
    ),
    "activation_checkpointing.number_checkpoints": none(say.EACH_LAYER, None),
    **alike(
        none(say.OWN_CHECKPOINTS),
        "checkpoint checkpoint.tag_validation checkpoint.load_universal checkpoint.use_node_local_storage "
        "checkpoint.parallel_write checkpoint.checkpoint_serialization checkpoint.writer datastates_ckpt",
    ),
    "dataloader_drop_last": none(say.EVERY_ROW, False),
    "data_efficiency": refused("every epoch has every row once"),
    "vocabulary_size": none("the model sets the vocabulary size", None),
    "autotuning": none("batch sizes are not tuned; `trainer check` shows the memory"),
    "pipeline": none("DeepSpeed's pipeline engine is not supported; see parallel.pipeline"),
    "tensor_parallel": none("DeepSpeed's AutoTP is not supported; see parallel.tensor"),
    "expert_parallel": none(say.NO_EXPERTS),
    "use_data_before_expert_parallelism": none(say.NO_EXPERTS, False),
    "hybrid_engine": none("text generation during training is not supported"),
    "weight_quantization": refused(say.NO_FP8),
    "compile": none(say.NOT_COMPILED),
    "log_level": none(say.NO_LOG_LEVELS, None),
    "elasticity": none('`parallel.elastic` "data" lets nodes join and leave, with the same global batch'),
    "nebula": none(
        "`checkpoint.memory` keeps frequent checkpoints in the memory of the hosts, written in the background"
    ),
    **alike(_REMOVED, "amp sparse_gradients eigenvalue graph_harvesting"),
    **alike(
        refused("DeepSpeed has removed this key"),
        "curriculum_learning compression_training quantize_training sparse_attention progressive_layer_drop",
    ),
}
