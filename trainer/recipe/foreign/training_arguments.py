"""Keys of `transformers.TrainingArguments`, and arguments of the example scripts of transformers.

A test compares names and defaults with the pinned version of transformers.
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

_TRACKIO = "Trackio is not supported; see logging.to"
_NO_ACCELERATOR = "the trainer does not use Accelerator"

FIELDS: dict[str, Counterpart] = {
    "output_dir": mapped("checkpoint.folder", None, "trainer_output"),
    # amount and batch
    "per_device_train_batch_size": mapped("training.micro_batch_size", 8, note=say.STEP_TOTAL),
    "num_train_epochs": mapped(
        "training.epochs", 3.0, note="an integer; use training.max_steps to end inside an epoch"
    ),
    "max_steps": mapped("training.max_steps", -1, note="null instead of -1"),
    "gradient_accumulation_steps": none(say.ACCUMULATION, 1),
    "average_tokens_across_devices": same(say.BATCH_MEAN, True),
    "auto_find_batch_size": none("the result must not depend on the memory of a device", False),
    # learning rate and optimizer
    "learning_rate": renamed("optimizer.learning_rate", 5e-5, value=convert_by.number),
    "lr_scheduler_type": mapped("schedule.name", "linear"),
    "lr_scheduler_kwargs": mapped("schedule", None, {}, note=say.SCHEDULE_KEYS),
    "warmup_steps": mapped("schedule.warmup", 0, note=say.WHOLE_STEPS),
    "optim": mapped(
        "optimizer.name",
        "adamw_torch_fused",
        "adamw_torch",
        note=convert_by.OPTIMIZER_NAMES,
        value=convert_by.optimizer,
    ),
    "optim_args": refused("optimizers have no further arguments", None),
    "weight_decay": renamed("optimizer.weight_decay", 0.0, note="both exclude biases and norm weights"),
    "adam_beta1": mapped("optimizer.betas", 0.9, note=say.BOTH_BETAS),
    "adam_beta2": mapped("optimizer.betas", 0.999, note=say.BOTH_BETAS),
    "adam_epsilon": mapped("optimizer.epsilon", 1e-8),
    "optim_target_modules": refused("GaLore and APOLLO are not supported", None),
    "max_grad_norm": mapped("training.max_grad_norm", 1.0, note=say.NO_CLIPPING, value=convert_by.above_zero),
    "label_smoothing_factor": mapped("task.label_smoothing", 0.0, note="of classifications"),
    # precision, memory and speed
    **alike(mapped("precision", False, note=say.WORD_OF_PRECISION), "bf16 fp16"),
    **alike(
        none("evaluation has the precision of training, with weights in fp32", False), "bf16_full_eval fp16_full_eval"
    ),
    "tf32": renamed("tf32", None, False),
    **alike(
        mapped("activation_checkpointing", None, False, note=say.RECOMPUTE, value=convert_by.switch("full")),
        "activation_checkpointing gradient_checkpointing",
    ),
    **alike(
        none("recomputation is always non-reentrant", None),
        "activation_checkpointing_kwargs gradient_checkpointing_kwargs",
    ),
    "torch_compile": none(say.NOT_COMPILED, False),
    **alike(none(say.NOT_COMPILED, None), "torch_compile_backend torch_compile_mode"),
    "use_liger_kernel": none("the kernels are torch's own", False),
    "liger_kernel_config": none("the kernels are torch's own", None),
    "use_cache": same("training uses no key-value cache", False),
    "neftune_noise_alpha": mapped(
        "model.neftune_alpha",
        None,
        note="L is the length of each row, not of the padded batch",
        value=convert_by.above_zero,
    ),
    "torch_empty_cache_steps": none("torch manages the cache of its allocator", None),
    # logging
    "logging_strategy": mapped("logging.every", "steps", note=say.ONE_INTERVAL),
    "logging_steps": mapped("logging.every", 500, note=say.INTERVAL),
    "logging_first_step": none("the first line is at the end of the first interval", False),
    "log_on_each_node": same("rank 0 writes the log; the launcher collects the output of each rank", True),
    "logging_nan_inf_filter": none("a non-finite loss ends the run, or counts in training.max_bad_steps", True),
    "include_num_input_tokens_seen": same("`metrics.jsonl` always counts tokens", "no", False),
    "log_level": none(say.NO_LOG_LEVELS, "passive"),
    "log_level_replica": none(say.NO_LOG_LEVELS, "warning"),
    "disable_tqdm": none("terminals show a progress bar, other outputs show lines", None, False),
    "report_to": mapped("logging.to", "none", []),
    "run_name": mapped("name", None, note="letters, digits, `.`, `_` and `-`"),
    "project": none(_TRACKIO, "huggingface"),
    **alike(none(_TRACKIO, None), "trackio_space_id trackio_bucket_id trackio_static_space_id"),
    # evaluation
    "eval_strategy": mapped("evaluation.every", "no", note=say.ONE_INTERVAL),
    "eval_steps": mapped("evaluation.every", None, note=say.INTERVAL),
    "eval_delay": none("the first evaluation is at the end of the first interval", 0),
    "per_device_eval_batch_size": mapped(
        "evaluation.batch_size", 8, note="metrics do not depend on it", value=convert_by.positive
    ),
    "prediction_loss_only": none("the metrics of the task are always computed", False),
    "eval_on_start": none("the first evaluation is at the end of the first interval", False),
    "eval_do_concat_batches": same(say.ALWAYS_ON, True),
    "eval_use_gather_object": same("each task gathers its predictions", False),
    "eval_accumulation_steps": none("predictions move to the CPU after each batch", None),
    "include_for_metrics": none("task.metrics names the metrics", []),
    "batch_eval_metrics": none("metrics are computed over the whole split", False),
    # checkpoints
    "save_only_model": none("a checkpoint always has the state to resume", False),
    "save_strategy": mapped("checkpoint.every", "steps", note=say.ONE_INTERVAL),
    "save_steps": mapped("checkpoint.every", 500, note=say.INTERVAL),
    "save_on_each_node": none("nodes share checkpoint.folder", False),
    "save_total_limit": mapped("checkpoint.keep", None, note="a number; the default is 2"),
    "enable_jit_checkpoint": none(
        "a signal always saves; the run exits with code 75, and the same command resumes it", False
    ),
    "load_best_model_at_end": mapped("evaluation.best", False, note="the best model is in `best/` of the run"),
    "metric_for_best_model": mapped("evaluation.best", None),
    "greater_is_better": none("each metric defines its better direction", None),
    "ignore_data_skip": none("a resumed run continues with the next row", False),
    "restore_callback_states_from_checkpoint": none("callbacks have no state; all other state is restored", False),
    "resume_from_checkpoint": mapped("checkpoint.resume", None, note='"auto": the newest in checkpoint.folder'),
    # the hub
    **alike(none(say.OWN_FOLDER, False), "push_to_hub hub_always_push"),
    "hub_token": none(say.OWN_FOLDER, None, "<HUB_TOKEN>"),
    **alike(none(say.OWN_FOLDER, None), "hub_private_repo hub_model_id hub_revision"),
    "hub_strategy": none(say.OWN_FOLDER, "every_save"),
    # reproducibility
    "full_determinism": none("see training.layout_invariant_dropout for results across layouts", False),
    "seed": renamed("training.seed", 42, note="the same seed gives other random numbers"),
    "data_seed": mapped("training.seed", None, note="one seed for all random numbers"),
    # devices, ranks, data loading
    "use_cpu": launcher(say.DEVICE, False),
    "accelerator_config": none(_NO_ACCELERATOR, None),
    "accelerator_config.split_batches": mapped(
        "training.micro_batch_size", False, note="the batch of one rank, or of all ranks"
    ),
    "accelerator_config.dispatch_batches": same("each rank reads its own rows", None, False),
    "accelerator_config.even_batches": none("no row is repeated to fill a batch", True),
    "accelerator_config.use_seedable_sampler": same("the order depends only on seed, epoch and step", True),
    "accelerator_config.non_blocking": none("the loader decides on copies to the GPU", False),
    "accelerator_config.gradient_accumulation_kwargs": none(say.ACCUMULATION, None),
    "accelerator_config.use_configured_state": none(_NO_ACCELERATOR, False),
    "parallelism_config": none("a file cannot hold this Python object; convert accelerate's YAML", None),
    "dataloader_drop_last": none(say.EVERY_ROW, False),
    "dataloader_num_workers": renamed("data.num_workers", 0),
    "dataloader_pin_memory": same(f"{say.ALWAYS_ON} on GPUs", True),
    "dataloader_persistent_workers": none("the loader sets this itself", False),
    **alike(none("the loader sets this itself", None), "dataloader_prefetch_factor dataloader_multiprocessing_context"),
    "dataloader_in_order": same(say.ALWAYS_ON, True),
    "remove_unused_columns": same("the task names its columns", True),
    "label_names": none("the task names its label column: task.label", None),
    "train_sampling_strategy": mapped("data.group_by_length", "random", note="true or false"),
    "length_column_name": none("lengths are those of the tokenised texts", "length"),
    "ddp_find_unused_parameters": none("every parameter must take part in every step", None, False),
    **alike(
        none("DistributedDataParallel's defaults apply", None),
        "ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph",
    ),
    "ddp_backend": same(say.BACKEND, None),
    "ddp_timeout": mapped("parallel.stall_timeout", 1800, note=say.TIME),
    "fsdp": mapped("parallel.strategy", None, False, "", [], note=say.STRATEGIES),
    "fsdp_config": mapped("parallel.strategy", None, {}, note=say.STRATEGIES),
    "deepspeed": mapped("parallel.strategy", None, note=say.STRATEGIES),
    "debug": none(say.STALL, "", []),
    "skip_memory_metrics": same("`metrics.jsonl` has the peak memory of each interval", True),
    # for the example scripts
    "do_train": same("`trainer run` trains", False, True),
    "do_eval": mapped("evaluation.every", False, note="null: never"),
    "do_predict": none("`trainer run` does not predict; use the exported model", False),
    "local_rank": launcher(say.RANKS, -1),
}
"""The fields of the dataclass in the pinned version, each with its default."""

_FSDP_OF_ARGUMENTS: dict[str, Counterpart] = {
    **prefixed("fsdp_config.", FSDP),
    "fsdp_config.cpu_offload": mapped(
        "parallel.offload", False, note=say.OFFLOAD, value=convert_by.switch("parameters")
    ),
    **alike(none(say.NO_TPU, False), "fsdp_config.xla fsdp_config.xla_fsdp_v2 fsdp_config.xla_fsdp_grad_ckpt"),
    "fsdp_config.xla_fsdp_settings": none(say.NO_TPU, {}),
}

OLD_NAMES: dict[str, Counterpart] = {
    "per_gpu_train_batch_size": mapped("training.micro_batch_size", note=say.STEP_TOTAL),
    **alike(renamed("evaluation.batch_size"), "per_gpu_eval_batch_size eval_batch_size"),
    "batch_size": renamed("training.global_batch_size", note="of all ranks; see also training.micro_batch_size"),
    "num_epochs": mapped("training.epochs"),
    "warmup_ratio": mapped("schedule.warmup", 0.0, 0, None, note=say.SHARE),
    "overwrite_output_dir": mapped("checkpoint.resume", False, note='"auto" or "never"; nothing is overwritten'),
    "evaluation_strategy": mapped("evaluation.every", "no", note=say.ONE_INTERVAL),
    "early_stopping_patience": renamed("evaluation.patience", note="counted in evaluations"),
    "early_stopping_threshold": none("any improvement counts", 0.0, 0),
    "logging_dir": none("logs are in checkpoint.folder", None),
    **alike(launcher(say.DEVICE, False), "no_cuda use_mps_device device"),
    "group_by_length": renamed("data.group_by_length", False),
    "save_safetensors": same("weights are always safetensors", True),
    "include_inputs_for_metrics": none("task.metrics names the metrics", False),
    "include_tokens_per_second": same("`metrics.jsonl` always has tokens per second", False, True),
    "fp16_opt_level": none("mixed precision uses torch.autocast", "O1"),
    **alike(none("mixed precision uses torch.autocast", "auto"), "fp16_backend half_precision_backend"),
    **alike(none("the kernels are torch's own", False), "use_ipex jit_mode_eval"),
    **alike(none(say.NO_TPU, None, False), "tpu_num_cores tpu_metrics_debug"),
    "fsdp_min_num_params": none(say.WRAPPED_BY_FAMILY, 0),
    "fsdp_transformer_layer_cls_to_wrap": none(say.WRAPPED_BY_FAMILY, None),
    "torchdynamo": none(say.NOT_COMPILED, None),
    "ray_scope": none("hyperparameter search is not supported", "last"),
    "past_index": none("models with past states are not supported", -1),
    "mp_parameters": none("SageMaker's model parallelism is not supported", ""),
    **alike(none(_NO_ACCELERATOR, None), "split_batches dispatch_batches"),
    **alike(
        none(say.OWN_FOLDER, None, "<PUSH_TO_HUB_TOKEN>"),
        "push_to_hub_model_id push_to_hub_organization push_to_hub_token",
    ),
}
"""Fields of earlier versions of transformers, and common misspellings; the pinned version has none of them."""

SCRIPTS: dict[str, Counterpart] = {
    "model_name_or_path": mapped("model.name_or_path"),
    "model_name": mapped("model.name_or_path"),
    "model_revision": renamed("model.revision", "main"),
    "tokenizer_name": mapped("model.tokenizer", None),
    "config_name": mapped("model.config", None, note="the configuration as an object, for random weights"),
    "model_type": none("model.config has it, for random weights", None),
    "config_overrides": none("model.config has the whole configuration, for random weights", None),
    "trust_remote_code": none(say.NO_CODE, False),
    "cache_dir": none("HF_HOME sets the cache folder of transformers and datasets", None),
    **alike(none("set the token by HF_TOKEN or `hf auth login`", None, False), "token use_auth_token"),
    "use_fast_tokenizer": same(say.ALWAYS_ON, True),
    "ignore_mismatched_sizes": none("a head of another size is an error", False),
    **alike(none("trained weights are fp32 or bf16; see precision and weights", None), "torch_dtype dtype"),
    "low_cpu_mem_usage": same(say.OWN_PART, False, True),
    "dataset_name": mapped("data.name", None, note=say.HUB),
    "dataset_config_name": mapped("data.subset", None, note=say.HUB),
    "task_name": mapped("data.subset", None, note='with data.source "hub" and data.name "nyu-mll/glue"'),
    "train_file": mapped("data.train", None, note=say.FILES),
    "validation_file": mapped("data.validation", None, note=say.FILES),
    "train_split_name": mapped("data.train", None, note=say.HUB),
    "validation_split_name": mapped("data.validation", None, note=say.HUB),
    **alike(none("`trainer run` reads only a training and a validation split", None), "test_file test_split_name"),
    "validation_split_percentage": none("write the share, such as 0.05, in data.validation", 5),
    "max_train_samples": refused("name a split or file with these rows", None),
    **alike(
        none("name a split or file with these rows", None),
        "remove_splits remove_columns max_eval_samples max_predict_samples",
    ),
    "max_seq_length": mapped("data.max_length", 128, None),
    "pad_to_max_length": none("texts are padded to the longest text of the batch", True, False),
    "overwrite_cache": none("the cache key covers all inputs", False),
    "preprocessing_num_workers": renamed("data.preparation_processes", None),
    "line_by_line": same("each row is one text", True),
    "streaming": none("set `data.streaming`, for Parquet or JSON Lines files", False),
    "text_column_names": mapped("task.text", None),
    "text_column_name": mapped("task.text", None),
    "text_column_delimiter": none("task.text takes a pair of columns", " "),
    "label_column_name": mapped("task.label", None),
    "image_column_name": mapped("task.image", note='with task.type "image_classification"'),
    "do_regression": mapped("task.type", None, False, note='"sequence_regression"'),
    "shuffle_train_dataset": same("each epoch has another order", False, True),
    "shuffle_seed": none("training.seed is the seed of all random numbers", 42),
    "mlm": mapped("task.type", note='"masked_lm"'),
    "mlm_probability": mapped("task.mask_probability", 0.15, note=say.MASKED_LM),
    "metric_name": mapped("task.metrics", None, note="a list"),
}
"""Arguments of run_glue.py, run_classification.py, run_mlm.py and run_image_classification.py."""

TRAINING_ARGUMENTS: dict[str, Counterpart] = {**FIELDS, **_FSDP_OF_ARGUMENTS, **OLD_NAMES, **SCRIPTS}
