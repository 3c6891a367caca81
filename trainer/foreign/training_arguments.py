"""The keys of `transformers.TrainingArguments`, and the arguments of the example scripts of transformers.

A test compares names and defaults with the pinned version of transformers.
"""

from __future__ import annotations

from trainer.foreign import remarks as say
from trainer.foreign.counterpart import Counterpart, alike, launcher, mapped, none, renamed, same
from trainer.foreign.fsdp import FSDP

_TRACKIO = none("Trackio is not among the places to log to; see logging.to", None)
_DDP_BUCKETS = none("buckets and buffers are DistributedDataParallel's own choice", None)
_NODE_FOLDER = none("nodes share checkpoint.folder", False)
_NO_LEVELS = "there are no levels of detail"
_WORKERS = "data.num_workers processes per rank prepare batches, in order; how, is the loader's business"

FIELDS: dict[str, Counterpart] = {
    "output_dir": mapped("checkpoint.folder", None, "trainer_output"),
    # amount and batch
    "per_device_train_batch_size": mapped("training.micro_batch_size", 8, note=say.STEP_TOTAL),
    "num_train_epochs": mapped("training.epochs", 3.0, note="a whole number; max_steps ends inside an epoch"),
    "max_steps": mapped("training.max_steps", -1, note="-1 is null here"),
    "gradient_accumulation_steps": none(say.ACCUMULATION, 1),
    "average_tokens_across_devices": same(
        "the loss is the mean over all valid labels of the global batch, however it is cut", True
    ),
    "auto_find_batch_size": none("what is learned must not depend on the memory of one device", False),
    # learning rate and optimizer
    "learning_rate": renamed("optimizer.learning_rate", 5e-5),
    "lr_scheduler_type": mapped("schedule.name", "linear"),
    "lr_scheduler_kwargs": none("linear and cosine end at 0; constant stays", None, {}),
    "warmup_steps": mapped("schedule.warmup", 0, note=say.WHOLE_STEPS),
    "optim": mapped(
        "optimizer.name",
        "adamw_torch_fused",
        "adamw_torch",
        note="adamw or sgd; the fused form is taken where there is one",
    ),
    "optim_args": none("optimizers take no further arguments", None),
    "weight_decay": renamed("optimizer.weight_decay", 0.0, note="in both not applied to biases and norm weights"),
    "adam_beta1": mapped("optimizer.betas", 0.9, note=say.BOTH_BETAS),
    "adam_beta2": mapped("optimizer.betas", 0.999, note=say.BOTH_BETAS),
    "adam_epsilon": mapped("optimizer.epsilon", 1e-8),
    "optim_target_modules": none("GaLore and APOLLO are not among the optimizers", None),
    "max_grad_norm": mapped("training.max_grad_norm", 1.0, note="null, not 0, means no clipping"),
    "label_smoothing_factor": none("this version does not smooth labels", 0.0),
    # precision, memory and speed
    "bf16": mapped("precision", False, note=say.WORD_OF_PRECISION),
    "fp16": mapped("precision", False, note=say.WORD_OF_PRECISION),
    "bf16_full_eval": none("evaluation computes as training does, with weights in fp32", False),
    "fp16_full_eval": none("evaluation computes as training does, with weights in fp32", False),
    "tf32": none("fp32 means fp32", None, False),
    "activation_checkpointing": mapped("activation_checkpointing", None, False, note=say.RECOMPUTE),
    "activation_checkpointing_kwargs": none("recomputation is always the non-reentrant one", None),
    "gradient_checkpointing": mapped("activation_checkpointing", None, False, note=say.RECOMPUTE),
    "gradient_checkpointing_kwargs": none("recomputation is always the non-reentrant one", None),
    "torch_compile": none(say.NOT_COMPILED, False),
    "torch_compile_backend": none(say.NOT_COMPILED, None),
    "torch_compile_mode": none(say.NOT_COMPILED, None),
    "use_liger_kernel": none("the kernels are torch's own", False),
    "liger_kernel_config": none("the kernels are torch's own", None),
    "use_cache": same("training keeps no key-value cache", False),
    "neftune_noise_alpha": none("embeddings get no noise", None),
    "torch_empty_cache_steps": none("the allocator's cache is left to torch", None),
    # logging
    "logging_strategy": mapped("logging.every", "steps", note=say.ONE_INTERVAL),
    "logging_steps": mapped("logging.every", 500, note=say.INTERVAL),
    "logging_first_step": none("the first line is that of the first interval", False),
    "log_on_each_node": same("the first rank of all writes; each rank's own output is its launcher's", True),
    "logging_nan_inf_filter": none("a loss that is not finite ends the run, or counts in training.max_bad_steps", True),
    "include_num_input_tokens_seen": same("`metrics.jsonl` counts tokens always", "no", False),
    "log_level": none(_NO_LEVELS, "passive"),
    "log_level_replica": none(_NO_LEVELS, "warning"),
    "disable_tqdm": none("a bar is drawn in a terminal, plain lines elsewhere", None, False),
    "report_to": mapped("logging.to", "none", []),
    "run_name": mapped("name", None, note="letters, digits, `.`, `_` and `-`"),
    "project": none("Trackio is not among the places to log to; see logging.to", "huggingface"),
    **alike(_TRACKIO, "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
    # evaluation
    "eval_strategy": mapped("evaluation.every", "no", note=say.ONE_INTERVAL),
    "eval_steps": mapped("evaluation.every", None, note=say.INTERVAL),
    "eval_delay": none("evaluations begin with the first interval", 0),
    "per_device_eval_batch_size": mapped("evaluation.batch_size", 8, note="it changes no metric"),
    "prediction_loss_only": none("the metrics of the task are always computed", False),
    "eval_on_start": none("evaluations begin with the first interval", False),
    "eval_do_concat_batches": same(say.ALWAYS_ON, True),
    "eval_use_gather_object": same("predictions are gathered in a way that fits the task", False),
    "eval_accumulation_steps": none("predictions leave the GPU batch by batch", None),
    "include_for_metrics": none("metrics are the named ones of the task", []),
    "batch_eval_metrics": none("metrics are computed over the whole split", False),
    # checkpoints
    "save_only_model": none("a checkpoint always holds all that is needed to go on", False),
    "save_strategy": mapped("checkpoint.every", "steps", note=say.ONE_INTERVAL),
    "save_steps": mapped("checkpoint.every", 500, note=say.INTERVAL),
    "save_on_each_node": _NODE_FOLDER,
    "save_total_limit": mapped("checkpoint.keep", None, note="a number: not all are kept"),
    "enable_jit_checkpoint": none("a signal always saves: exit 75, and the same command goes on", False),
    "load_best_model_at_end": mapped("evaluation.best", False, note="the best model lies in `best/` of the run"),
    "metric_for_best_model": mapped("evaluation.best", None),
    "greater_is_better": none("each metric knows which direction is better", None),
    "ignore_data_skip": none("a resumed run goes on with the very next row", False),
    "restore_callback_states_from_checkpoint": none("there are no callbacks; all state is restored", False),
    "resume_from_checkpoint": mapped(
        "checkpoint.resume", None, note='"auto" goes on from the newest in checkpoint.folder'
    ),
    # the hub
    "push_to_hub": none(say.OWN_FOLDER, False),
    "hub_token": none(say.OWN_FOLDER, None, "<HUB_TOKEN>"),
    "hub_private_repo": none(say.OWN_FOLDER, None),
    "hub_model_id": none(say.OWN_FOLDER, None),
    "hub_strategy": none(say.OWN_FOLDER, "every_save"),
    "hub_always_push": none(say.OWN_FOLDER, False),
    "hub_revision": none(say.OWN_FOLDER, None),
    # reproducibility
    "full_determinism": none(
        "one layout gives one result; across layouts see training.layout_invariant_dropout", False
    ),
    "seed": renamed("training.seed", 42, note="the same number draws other values here"),
    "data_seed": mapped("training.seed", None, note="one seed for everything"),
    # devices, ranks, data loading
    "use_cpu": launcher(say.DEVICE, False),
    "accelerator_config": none("there is no Accelerator", None),
    "accelerator_config.split_batches": mapped(
        "training.micro_batch_size", False, note="whether the batch is that of one rank or of all"
    ),
    "accelerator_config.dispatch_batches": same("each rank reads its own rows", None, False),
    "accelerator_config.even_batches": none("no row is repeated to fill a batch up", True),
    "accelerator_config.use_seedable_sampler": same("the order is a function of seed, epoch and step", True),
    "accelerator_config.non_blocking": none("copies to the GPU are the loader's business", False),
    "accelerator_config.gradient_accumulation_kwargs": none(say.ACCUMULATION, None),
    "accelerator_config.use_configured_state": none("there is no Accelerator", False),
    "parallelism_config": none("an object of Python, which a file cannot hold; give accelerate's YAML", None),
    "dataloader_drop_last": none("every row counts; the last batch of an epoch may be smaller", False),
    "dataloader_num_workers": renamed("data.num_workers", 0),
    "dataloader_pin_memory": same(f"{say.ALWAYS_ON} on GPUs", True),
    "dataloader_persistent_workers": none(_WORKERS, False),
    "dataloader_prefetch_factor": none(_WORKERS, None),
    "dataloader_multiprocessing_context": none(_WORKERS, None),
    "dataloader_in_order": same(say.ALWAYS_ON, True),
    "remove_unused_columns": same("the task names the columns that are read", True),
    "label_names": none("the task names its label column: task.label", None),
    "train_sampling_strategy": mapped("data.group_by_length", "random", note="true or false"),
    "length_column_name": none("lengths are those of the tokenised texts", "length"),
    "ddp_find_unused_parameters": none("every parameter must take part in every step", None, False),
    "ddp_bucket_cap_mb": _DDP_BUCKETS,
    "ddp_broadcast_buffers": _DDP_BUCKETS,
    "ddp_static_graph": _DDP_BUCKETS,
    "ddp_backend": same("NCCL on GPUs, gloo on CPUs", None),
    "ddp_timeout": mapped("parallel.stall_timeout", 1800, note='a time with its unit: "10 minutes"'),
    "fsdp": mapped("parallel.strategy", None, False, "", [], note=say.STRATEGIES),
    "fsdp_config": mapped("parallel.strategy", None, {}, note=say.STRATEGIES),
    "deepspeed": mapped("parallel.strategy", None, note=say.STRATEGIES),
    "debug": none("a rank that stands still is found by parallel.stall_timeout", "", []),
    "skip_memory_metrics": same("the peak memory of each interval is in `metrics.jsonl`", True),
    # what the example scripts do with them
    "do_train": same("`trainer run` trains", False, True),
    "do_eval": mapped("evaluation.every", False, note="null: never"),
    "do_predict": none("`trainer run` trains and evaluates; predict with the exported model", False),
    "local_rank": launcher(say.RANKS, -1),
}
"""The fields of the dataclass at the pinned version, each with the default that it has there."""

_FSDP_OF_ARGUMENTS: dict[str, Counterpart] = {
    **{f"fsdp_config.{name}": row for name, row in FSDP.items()},
    "fsdp_config.cpu_offload": mapped("parallel.offload", False, note=say.OFFLOAD),
    "fsdp_config.xla": none(say.NO_TPU, False),
    "fsdp_config.xla_fsdp_v2": none(say.NO_TPU, False),
    "fsdp_config.xla_fsdp_grad_ckpt": none(say.NO_TPU, False),
    "fsdp_config.xla_fsdp_settings": none(say.NO_TPU, {}),
}

OLD_NAMES: dict[str, Counterpart] = {
    **alike(mapped("training.micro_batch_size", note=say.STEP_TOTAL), "per_gpu_train_batch_size"),
    **alike(renamed("evaluation.batch_size"), "per_gpu_eval_batch_size", "eval_batch_size"),
    "batch_size": renamed(
        "training.global_batch_size", note="of all ranks; one forward pass: training.micro_batch_size"
    ),
    "num_epochs": mapped("training.epochs"),
    "warmup_ratio": mapped("schedule.warmup", 0.0, 0, None, note=say.SHARE),
    "overwrite_output_dir": mapped(
        "checkpoint.resume", False, note='"auto" goes on, "never" refuses; nothing is overwritten'
    ),
    "evaluation_strategy": mapped("evaluation.every", "no", note=say.ONE_INTERVAL),
    "early_stopping_patience": renamed("evaluation.patience", note="counted in evaluations"),
    "early_stopping_threshold": none("any better value counts", 0.0, 0),
    "logging_dir": none("logs lie in checkpoint.folder", None),
    "no_cuda": launcher(say.DEVICE, False),
    "use_mps_device": launcher(say.DEVICE, False),
    "group_by_length": renamed("data.group_by_length", False),
    "save_safetensors": same("weights are always safetensors", True),
    "include_inputs_for_metrics": none("metrics are the named ones of the task", False),
    "include_tokens_per_second": same("`metrics.jsonl` holds tokens per second always", False, True),
    "fp16_opt_level": none("mixed precision is torch's own autocast", "O1"),
    **alike(none("mixed precision is torch's own autocast", "auto"), "fp16_backend", "half_precision_backend"),
    **alike(none("the kernels are torch's own", False), "use_ipex", "jit_mode_eval"),
    **alike(none(say.NO_TPU, None, False), "tpu_num_cores", "tpu_metrics_debug"),
    "fsdp_min_num_params": none(say.WRAPPED_BY_FAMILY, 0),
    "fsdp_transformer_layer_cls_to_wrap": none(say.WRAPPED_BY_FAMILY, None),
    "torchdynamo": none(say.NOT_COMPILED, None),
    "ray_scope": none("this version searches no hyperparameters", "last"),
    "past_index": none("models that feed back their past are not trained here", -1),
    "mp_parameters": none("SageMaker's model parallelism is not used", ""),
    **alike(none("the task decides what is computed", None), "split_batches", "dispatch_batches"),
    **alike(
        none(say.OWN_FOLDER, None, "<PUSH_TO_HUB_TOKEN>"),
        "push_to_hub_model_id",
        "push_to_hub_organization",
        "push_to_hub_token",
    ),
}
"""What earlier versions of transformers, or users, call fields: the pinned version has none of them."""

SCRIPTS: dict[str, Counterpart] = {
    "model_name_or_path": mapped("model.name_or_path"),
    "model_name": mapped("model.name_or_path"),
    "model_revision": renamed("model.revision", "main"),
    "tokenizer_name": mapped("model.tokenizer", None),
    "config_name": mapped("model.config", None, note="the configuration itself, for random weights"),
    "model_type": none("model.config names it, for random weights", None),
    "config_overrides": none("model.config holds the whole configuration, for random weights", None),
    "trust_remote_code": none(say.NO_CODE, False),
    **alike(none("HF_HOME says where transformers and datasets keep what they load", None), "cache_dir"),
    **alike(none("HF_TOKEN, or `hf auth login`, holds the token", None, False), "token", "use_auth_token"),
    "use_fast_tokenizer": same(say.ALWAYS_ON, True),
    "ignore_mismatched_sizes": none("a head of another size is refused", False),
    **alike(none("master weights are fp32; see precision", None), "torch_dtype", "dtype"),
    "low_cpu_mem_usage": same("each rank reads only what it holds", False, True),
    "dataset_name": mapped("data.name", None, note=say.HUB),
    "dataset_config_name": mapped("data.subset", None, note=say.HUB),
    "task_name": mapped("data.subset", None, note='with data.source "hub" and data.name "nyu-mll/glue"'),
    "train_file": mapped("data.train", None, note=say.FILES),
    "validation_file": mapped("data.validation", None, note=say.FILES),
    "train_split_name": mapped("data.train", None, note=say.HUB),
    "validation_split_name": mapped("data.validation", None, note=say.HUB),
    **alike(none("`trainer run` reads a training and a validation split only", None), "test_file", "test_split_name"),
    "validation_split_percentage": none("name a validation split or file: data.validation", 5),
    **alike(none("name a split or file that holds the rows that you want", None), "remove_splits", "remove_columns"),
    **alike(
        none("name a split or file that holds the rows that you want", None),
        "max_train_samples",
        "max_eval_samples",
        "max_predict_samples",
    ),
    "max_seq_length": mapped("data.max_length", 128, None),
    "pad_to_max_length": none("texts are padded to the longest of their batch", True, False),
    "overwrite_cache": none("the cache is found by what it was made from", False),
    "preprocessing_num_workers": none("texts are tokenised once, and cached", None),
    "line_by_line": same("each row is one text", True),
    "streaming": none("the rows are counted before the first step", False),
    "text_column_names": mapped("task.text", None),
    "text_column_name": mapped("task.text", None),
    "text_column_delimiter": none("a pair of texts stays a pair: task.text", " "),
    "label_column_name": mapped("task.label", None),
    "image_column_name": mapped("task.image", note='with task.type "image_classification"'),
    "do_regression": mapped("task.type", None, False, note='"sequence_regression"'),
    "shuffle_train_dataset": same("each epoch has an order of its own", False, True),
    "shuffle_seed": none("one seed for everything: training.seed", 42),
    "mlm": mapped("task.type", note='"masked_lm"'),
    "mlm_probability": mapped("task.mask_probability", 0.15, note=say.MASKED_LM),
    "metric_name": mapped("task.metrics", None, note="a list"),
}
"""The arguments of run_glue.py, run_classification.py, run_mlm.py and run_image_classification.py."""

TRAINING_ARGUMENTS: dict[str, Counterpart] = {**FIELDS, **_FSDP_OF_ARGUMENTS, **OLD_NAMES, **SCRIPTS}
