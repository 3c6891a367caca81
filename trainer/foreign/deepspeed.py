"""The keys of a DeepSpeed JSON; a dot descends into a section.

A test compares the names with what the pinned version of DeepSpeed reads.
"""

from __future__ import annotations

from trainer.foreign import remarks as say
from trainer.foreign.counterpart import Counterpart, alike, mapped, none, renamed, same
from trainer.recipe.deepspeed import FREE_KEYS, FREE_ZERO_KEYS

_SCALE = none("the loss scale of fp16 is the trainer's own, the same under every strategy")
_OWN_SCHEDULE = "the schedule of the recipe has no such key"
_REMOVED = none("DeepSpeed itself has removed it")
_NO_ZERO_PLUS = none("ZeRO++ is not offered: weights and gradients travel whole")
_CHECKPOINT = none(say.OWN_CHECKPOINTS)


def _passed_on(prefix: str, names: tuple[str, ...]) -> dict[str, Counterpart]:
    """Keys that DeepSpeed itself gets from `parallel.deepspeed`."""
    return {
        f"{prefix}{name}": mapped(f"parallel.deepspeed.{prefix}{name}", note="under zero1 to zero3")
        for name in names
        if name != "zero_optimization"
    }


_ZERO: dict[str, Counterpart] = {
    **_passed_on("zero_optimization.", FREE_ZERO_KEYS),
    "zero_optimization.round_robin_gradients": none("DeepSpeed's partitions keep the order of the parameters", False),
    "zero_optimization.stage3_module_granularity_threshold": none("DeepSpeed's own default stays", 0),
    "zero_optimization.zero_hpz_partition_size": none(_NO_ZERO_PLUS.note, 1),
    "zero_optimization.load_from_fp32_weights": none(say.OWN_CHECKPOINTS, True),
    "zero_optimization.stage": mapped("parallel.strategy", 0, note=say.STRATEGIES),
    "zero_optimization.offload_optimizer": mapped("parallel.offload", None, note=say.OFFLOAD),
    "zero_optimization.offload_optimizer.device": mapped("parallel.offload", "none", None, note=say.OFFLOAD),
    "zero_optimization.offload_param": mapped("parallel.offload", None, note=say.OFFLOAD),
    "zero_optimization.offload_param.device": mapped("parallel.offload", "none", None, note=say.OFFLOAD),
    "zero_optimization.cpu_offload": mapped("parallel.offload", None, False, note=say.OFFLOAD),
    "zero_optimization.cpu_offload_param": mapped("parallel.offload", None, False, note=say.OFFLOAD),
    "zero_optimization.cpu_offload_params": mapped("parallel.offload", None, False, note=say.OFFLOAD),
    "zero_optimization.cpu_offload_use_pin_memory": none("pinning is left to DeepSpeed", None),
    **{
        f"zero_optimization.{section}.{name}": row
        for section in ("offload_optimizer", "offload_param")
        for name, row in {
            "pin_memory": none("pinning is left to DeepSpeed", True),
            "nvme_path": none(say.NO_NVME, None),
            "buffer_count": none(say.NO_NVME, 4, 5),
            "buffer_size": none(say.NO_NVME, 100_000_000),
            "max_in_cpu": none(say.NO_NVME, 1_000_000_000),
            "pipeline_read": none(say.NO_NVME, False),
            "pipeline_write": none(say.NO_NVME, False),
            "fast_init": none(say.NO_NVME, False),
            "ratio": none("all of the optimizer state is offloaded, or none", 1.0),
            "super_offload": none("offload is DeepSpeed's plain one", False),
            "cpuadam_cores_perc": none("offload is DeepSpeed's plain one", 0.8),
        }.items()
    },
    "zero_optimization.compute_grad_norm": same("every step shows the gradient norm", True),
    "zero_optimization.elastic_checkpoint": none(say.OWN_CHECKPOINTS, False),
    "zero_optimization.zenflow": none("offload is DeepSpeed's plain one", None),
    "zero_optimization.leaf_module": none("mixtures of experts are not in the table of families"),
    "zero_optimization.gather_16bit_weights_on_model_save": same("the model of a run is always written whole"),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": same("the model of a run is always written whole"),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": same("the model of a run is always written whole"),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": none("DeepSpeed's own default stays", False),
    "zero_optimization.stage3_allgather_sequential": none("DeepSpeed's own default stays", False),
    "zero_optimization.ignore_unused_parameters": none("every parameter must take part in every step", True),
    "zero_optimization.legacy_stage1": none("DeepSpeed's own default stays", False),
    "zero_optimization.parameter_alignment": none("DeepSpeed's own default stays", False),
    "zero_optimization.zero_quantized_weights": _NO_ZERO_PLUS,
    "zero_optimization.zero_quantized_nontrainable_weights": _NO_ZERO_PLUS,
    "zero_optimization.zero_quantized_gradients": _NO_ZERO_PLUS,
    "zero_optimization.memory_efficient_linear": none("it follows from activation_checkpointing", True),
    "zero_optimization.pipeline_loading_checkpoint": none(say.OWN_CHECKPOINTS, False),
    "zero_optimization.override_module_apply": none("DeepSpeed's own default stays", True),
    "zero_optimization.enable_sanity_checks": none("DeepSpeed's own default stays", False),
    "zero_optimization.save_muon_momentum_buffer_in_memory": none("Muon is not among the optimizers", False),
    **alike(
        _REMOVED,
        "zero_optimization.mics_shard_size",
        "zero_optimization.mics_hierarchical_params_gather",
        "zero_optimization.zeropp_loco_param",
    ),
}

_OPTIMIZER: dict[str, Counterpart] = {
    "optimizer": mapped("optimizer"),
    "optimizer.type": mapped("optimizer.name"),
    "optimizer.legacy_fusion": none("the kernel is torch's own", False),
    "optimizer.params": mapped("optimizer"),
    "optimizer.params.lr": renamed("optimizer.learning_rate"),
    "optimizer.params.betas": renamed("optimizer.betas"),
    "optimizer.params.eps": renamed("optimizer.epsilon"),
    "optimizer.params.weight_decay": renamed("optimizer.weight_decay"),
    "optimizer.params.momentum": renamed("optimizer.momentum", note="of sgd"),
    "optimizer.params.torch_adam": same("the kernel is torch's own, fused", False, True),
    "optimizer.params.adam_w_mode": none("weight decay is decoupled, as in AdamW", True),
    "optimizer.params.bias_correction": same(say.ALWAYS_ON, True),
    "optimizer.params.amsgrad": none("adamw keeps no largest second mean", False),
    "optimizer.params.max_grad_norm": none("DeepSpeed does not read it here; training.max_grad_norm clips", 0, 0.0),
}

_SCHEDULER: dict[str, Counterpart] = {
    "scheduler": mapped("schedule"),
    "scheduler.type": mapped("schedule.name", note="WarmupDecayLR is linear, WarmupCosineLR is cosine"),
    "scheduler.params": mapped("schedule"),
    "scheduler.params.warmup_num_steps": mapped("schedule.warmup", 1000, note=say.WHOLE_STEPS),
    "scheduler.params.total_num_steps": mapped("training.max_steps"),
    "scheduler.params.warmup_max_lr": mapped("optimizer.learning_rate"),
    "scheduler.params.warmup_min_lr": none("the warm-up begins near 0", 0, 0.0),
    "scheduler.params.warmup_min_ratio": none("the warm-up begins near 0", 0, 0.0),
    "scheduler.params.warmup_type": none('the warm-up is linear; DeepSpeed\'s default is "log"', "linear"),
    "scheduler.params.cos_min_ratio": none("cosine ends at 0; DeepSpeed's default is 0.0001", 0, 0.0),
    "scheduler.params.last_batch_iteration": none("a resumed run goes on where it was", -1),
}

_PRECISION: dict[str, Counterpart] = {
    "fp16": mapped("precision", note=say.WORD_OF_PRECISION),
    "fp16.enabled": mapped("precision", False, note=say.WORD_OF_PRECISION),
    "fp16.auto_cast": none("matrix products are in that type, weights in fp32", False),
    "fp16.loss_scale": none(_SCALE.note, 0, 0.0),
    "fp16.initial_scale_power": none(_SCALE.note, 16),
    "fp16.loss_scale_window": none(_SCALE.note, 1000),
    "fp16.hysteresis": none(_SCALE.note, 2),
    "fp16.consecutive_hysteresis": none(_SCALE.note, False),
    "fp16.min_loss_scale": none(_SCALE.note, 1),
    "fp16.fp16_master_weights_and_grads": none("master weights are fp32", False),
    "bf16": mapped("precision", note=say.WORD_OF_PRECISION),
    "bf16.enabled": mapped("precision", False, note=say.WORD_OF_PRECISION),
    "bf16.immediate_grad_update": none("gradients are fp32", False, True),
    "bf16.check_grad_overflow": none("a loss or norm that is not finite ends the run, or is skipped", True),
    "bf16.bf16_master_weights_and_grads": none("master weights are fp32", False),
    "bf16.bf16_optimizer_states": none("the optimizer's state is fp32", False),
    "bfloat16": mapped("precision", note=say.WORD_OF_PRECISION),
    "bfloat16.enabled": mapped("precision", False, note=say.WORD_OF_PRECISION),
    "torch_autocast": mapped("precision", note=say.WORD_OF_PRECISION),
    "torch_autocast.enabled": mapped("precision", False, note=say.WORD_OF_PRECISION),
    "torch_autocast.dtype": mapped("precision", None, note=say.WORD_OF_PRECISION),
    "torch_autocast.lower_precision_safe_modules": none("torch's own list says which operations are cast", None),
}

_LOGS: dict[str, Counterpart] = {
    "steps_per_print": mapped("logging.every", None, note=say.INTERVAL),
    "tensorboard": mapped("logging.to", note='"tensorboard" in the list'),
    "tensorboard.enabled": mapped("logging.to", False, note='"tensorboard" in the list'),
    "wandb": mapped("logging.to", note='"wandb" in the list'),
    "wandb.enabled": mapped("logging.to", False, note='"wandb" in the list'),
    "csv_monitor": mapped("logging.to", note='"csv" in the list'),
    "csv_monitor.enabled": mapped("logging.to", False, note='"csv" in the list'),
    **alike(
        none("logs lie in checkpoint.folder, named as the run"),
        "tensorboard.output_path",
        "tensorboard.job_name",
        "csv_monitor.output_path",
        "csv_monitor.job_name",
    ),
    **alike(none("the library's own environment variables say where it logs"), "wandb.group", "wandb.team"),
    "wandb.project": mapped("logging.project", "deepspeed"),
    "comet": none("Comet is not among the places to log to; see logging.to"),
}

DEEPSPEED: dict[str, Counterpart] = {
    **_passed_on("", FREE_KEYS),
    "train_batch_size": renamed("training.global_batch_size"),
    "train_micro_batch_size_per_gpu": renamed("training.micro_batch_size"),
    "gradient_accumulation_steps": none(say.ACCUMULATION, None),
    "managed_gradient_accumulation": none("the trainer marks the last microbatch of a step itself", True),
    "gradient_clipping": mapped("training.max_grad_norm", 1.0, note="null: no clipping"),
    **_OPTIMIZER,
    **_SCHEDULER,
    **_PRECISION,
    "zero_optimization": mapped("parallel.strategy", note=say.STRATEGIES),
    **_ZERO,
    **_LOGS,
    "zero_allow_untested_optimizer": same("the optimizer is torch's own", False, True),
    "zero_force_ds_cpu_optimizer": none("the optimizer is torch's own, with offload too", True, False),
    "prescale_gradients": none(say.ONE_DENOMINATOR, False),
    "gradient_predivide_factor": none(say.ONE_DENOMINATOR, 1.0),
    "gradient_allreduce_op": none(say.ONE_DENOMINATOR, "mean"),
    "aio": none(say.NO_NVME, None),
    "data_types": none("gradients are summed in fp32", None),
    "disable_allgather": none("DeepSpeed does not read it", False),
    "communication_data_type": none("gradients travel in fp32", None, "fp32"),
    "seq_parallel_communication_data_type": none("DeepSpeed's sequence parallelism is not used", "fp32"),
    "sequence_parallel_size": none(say.NO_CONTEXT_PARALLEL, 1),
    "disable_python_gc": none("garbage is collected as usual", False),
    "wall_clock_breakdown": none("`metrics.jsonl` holds the time of every step", False),
    "activation_checkpointing": none(
        "DeepSpeed only says how its own function recomputes, not that a model does; see activation_checkpointing"
    ),
    **alike(
        none(
            "DeepSpeed only says how its own function recomputes, not that a model does; see activation_checkpointing",
            False,
        ),
        "activation_checkpointing.partition_activations",
        "activation_checkpointing.contiguous_memory_optimization",
        "activation_checkpointing.synchronize_checkpoint_boundary",
        "activation_checkpointing.profile",
        "activation_checkpointing.cpu_checkpointing",
    ),
    "activation_checkpointing.number_checkpoints": none("each layer is recomputed by itself", None),
    "checkpoint": _CHECKPOINT,
    **alike(
        _CHECKPOINT,
        "checkpoint.tag_validation",
        "checkpoint.load_universal",
        "checkpoint.use_node_local_storage",
        "checkpoint.parallel_write",
        "checkpoint.checkpoint_serialization",
        "checkpoint.writer",
        "datastates_ckpt",
    ),
    "dataloader_drop_last": none("every row counts; the last batch of an epoch may be smaller", False),
    "data_efficiency": none("every epoch holds every row once"),
    "curriculum_learning": _REMOVED,
    "vocabulary_size": none("the vocabulary is that of the model", None),
    "autotuning": none("`trainer check` shows what fits; there is no search over batch sizes"),
    "pipeline": none("DeepSpeed's pipeline engine is not used; see parallel.pipeline"),
    "tensor_parallel": none("DeepSpeed's AutoTP is not used; see parallel.tensor"),
    "expert_parallel": none(say.NO_EXPERTS),
    "use_data_before_expert_parallelism": none(say.NO_EXPERTS, False),
    "hybrid_engine": none("this version generates no text while training"),
    "weight_quantization": none(say.NO_FP8),
    "compile": none(say.NOT_COMPILED),
    "log_level": none("there are no levels of detail", None),
    **alike(
        _REMOVED,
        "nebula",
        "compression_training",
        "amp",
        "quantize_training",
        "sparse_gradients",
        "eigenvalue",
        "sparse_attention",
        "elasticity",
        "graph_harvesting",
        "progressive_layer_drop",
    ),
}
