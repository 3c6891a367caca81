"""Keys of the YAML file of `accelerate config`; a dot descends into a section.

A test compares the names with the fields of the file and the options of the launcher in the pinned version.
"""

from __future__ import annotations

from trainer.recipe.foreign import remarks as say
from trainer.recipe.foreign import values as convert_by
from trainer.recipe.foreign.counterpart import (
    Counterpart,
    alike,
    launcher,
    mapped,
    none,
    prefixed,
    refused,
    renamed,
    same,
)
from trainer.recipe.foreign.fsdp import FSDP

_TOP: dict[str, Counterpart] = {
    "compute_environment": none("a recipe does not depend on the machine", "LOCAL_MACHINE"),
    "distributed_type": mapped("parallel.strategy", "NO", note=say.STRATEGIES),
    "mixed_precision": mapped("precision", None, "no", note=say.WORD_OF_PRECISION),
    "downcast_bf16": none(say.NO_TPU, False, "no"),
    "fp16": mapped("precision", False, note=say.WORD_OF_PRECISION),
    "use_cpu": launcher(say.DEVICE, False),
    "gpu_ids": launcher("the launcher or CUDA_VISIBLE_DEVICES selects the GPUs", None, "all"),
    **alike(launcher(say.RANKS, None), "main_process_ip main_process_port mpirun_config"),
    "num_processes": launcher(say.RANKS, -1),
    "num_machines": launcher(say.RANKS, 1),
    "machine_rank": launcher(say.RANKS, 0),
    "rdzv_backend": launcher(say.RANKS, "static"),
    "same_network": launcher(say.RANKS, False, True),
    "main_training_function": none("the launched program is `trainer run`", "main"),
    "enable_cpu_affinity": launcher("the launcher may bind processes to cores", False),
    "debug": none(say.STALL, False),
    "fp8_config": none(say.NO_FP8, None, {}),
    "deepspeed_config": mapped("parallel.strategy", None, {}, note=say.STRATEGIES),
    "fsdp_config": mapped("parallel.strategy", None, {}, note=say.STRATEGIES),
    "parallelism_config": mapped("parallel.tensor", None, {}, note="with parallel.strategy and parallel.shard"),
    "megatron_lm_config": mapped("parallel.tensor", None, {}, note="does not need Megatron-LM"),
    "dynamo_config": none(say.NOT_COMPILED, None, {}),
    "dynamo_backend": none(say.NOT_COMPILED, "NO", "no"),
    **alike(none(say.NO_TPU, None), "tpu_name tpu_zone command_file commands tpu_vm tpu_env"),
    **alike(none(say.NO_TPU, False), "tpu_use_cluster tpu_use_sudo"),
}

_SAGEMAKER = alike(
    none("SageMaker's launcher is not supported; start `trainer run` in the container", None),
    "ec2_instance_type iam_role_name image_uri profile region base_job_name pytorch_version "
    "transformers_version py_version sagemaker_inputs_file sagemaker_metrics_file additional_args",
)

_DEEPSPEED: dict[str, Counterpart] = {
    "deepspeed_config_file": mapped("parallel.strategy", None, note="the file is converted too"),
    "zero_stage": mapped("parallel.strategy", None, note=say.STRATEGIES),
    "offload_optimizer_device": mapped(
        "parallel.offload", None, "none", note=say.OFFLOAD, value=convert_by.device("optimizer")
    ),
    "offload_param_device": mapped(
        "parallel.offload", None, "none", note=say.OFFLOAD, value=convert_by.device("parameters")
    ),
    "offload_optimizer_nvme_path": none(say.NO_NVME, None, "none"),
    "offload_param_nvme_path": none(say.NO_NVME, None, "none"),
    "gradient_accumulation_steps": none(say.ACCUMULATION, None),
    "gradient_clipping": mapped("training.max_grad_norm", None, note=say.NO_CLIPPING, value=convert_by.above_zero),
    "zero3_init_flag": same(say.OWN_PART, None, True, False),
    "zero3_save_16bit_model": same(say.WHOLE_MODEL, None, True, False),
    "deepspeed_moe_layer_cls_names": none(say.NO_EXPERTS, None),
    **alike(
        launcher("trainer also runs under the deepspeed launcher, with arguments of that launcher", None),
        "deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter deepspeed_multinode_launcher",
    ),
}

_MEGATRON: dict[str, Counterpart] = {
    "tp_degree": renamed("parallel.tensor", 1, value=convert_by.positive),
    "pp_degree": renamed("parallel.pipeline.stages", 1, value=convert_by.positive),
    "num_micro_batches": mapped("parallel.pipeline.microbatches", None),
    "sequence_parallelism": mapped("parallel.sequence", None, False),
    "recompute_activations": mapped(
        "activation_checkpointing", None, False, note='"selective"', value=convert_by.switch("selective")
    ),
    "recompute_granularity": mapped("activation_checkpointing", None, note=say.RECOMPUTE, value=convert_by.text),
    **alike(none(say.EACH_LAYER, None), "recompute_method recompute_num_layers"),
    "use_distributed_optimizer": mapped("parallel.strategy", None, False, note="zero1"),
    "use_custom_fsdp": mapped("parallel.strategy", None, False, note="fsdp"),
    "gradient_clipping": mapped("training.max_grad_norm", 1.0, note=say.NO_CLIPPING, value=convert_by.above_zero),
    "optimizer_cpu_offload": mapped(
        "parallel.offload", None, False, note='"optimizer", under zero1 to zero3', value=convert_by.switch("optimizer")
    ),
    "use_precision_aware_optimizer": none(say.FP32_STATE, None, False),
    "overlap_cpu_optimizer_d2h_h2d": none(say.PLAIN_OFFLOAD, None, False),
    "decoder_last_pipeline_num_layers": none("layers are balanced by cost, or set by parallel.pipeline.split", None),
    "context_parallel_size": none("only from `parallelism_config`: set `parallel.context`", None, 1),
    "expert_model_parallel_size": none(say.NO_EXPERTS, None, 1),
    "expert_tensor_parallel_size": none(say.NO_EXPERTS, None, 1),
    **alike(refused("model.dropout sets all dropout probabilities", None), "attention_dropout hidden_dropout"),
    **alike(
        none("transformers defines the model and its loss", None, False),
        "attention_backend attention_softmax_in_fp32 use_rotary_position_embeddings",
    ),
    "eod_mask_loss": refused("transformers defines the model and its loss", None, False),
    "calculate_per_token_loss": same(say.BATCH_MEAN, None, True),
    **alike(none(say.OWN_CHECKPOINTS, None, False), "no_load_optim no_save_optim"),
}

_PARALLELISM: dict[str, Counterpart] = {
    "dp_replicate_size": mapped("parallel.strategy", 1, None, note="ddp, or hsdp with dp_shard_size"),
    "dp_shard_size": mapped("parallel.strategy", 1, None, note="fsdp, or hsdp with parallel.shard"),
    "tp_size": mapped("parallel.tensor", 1, None, value=convert_by.positive),
    **alike(
        mapped("parallel.context", 1, None, note=say.EXCHANGES_HEADS, value=convert_by.positive), "cp_size sp_size"
    ),
    **alike(none(say.OWN_CONTEXT, None), "sp_backend sp_seq_length sp_attn_implementation"),
    "cp_backend": none(say.OWN_CONTEXT, None, "torch"),
    "cp_comm_strategy": none(say.OWN_CONTEXT, None, "allgather"),
    "sp_seq_length_is_variable": none(say.OWN_CONTEXT, None, True),
}

_DYNAMO = {
    "backend": none(say.NOT_COMPILED, "NO", "no"),
    "mode": none(say.NOT_COMPILED, "default"),
    **alike(none(say.NOT_COMPILED, False), "use_fullgraph use_dynamic use_regional_compilation"),
}

ACCELERATE: dict[str, Counterpart] = {
    **_TOP,
    **_SAGEMAKER,
    **prefixed("deepspeed_config.", _DEEPSPEED),
    **prefixed("fsdp_config.fsdp_", FSDP),
    **prefixed("megatron_lm_config.megatron_lm_", _MEGATRON),
    **prefixed("parallelism_config.parallelism_config_", _PARALLELISM),
    **prefixed("dynamo_config.dynamo_", _DYNAMO),
}
