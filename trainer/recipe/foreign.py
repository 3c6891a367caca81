"""What other tools call our keys, so that a recipe written from habit gets the key to use here.

One table for each tool, in that tool's own spelling. To add a spelling, add a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from trainer.recipe.strategies import STRATEGY_NAMES


@dataclass(frozen=True)
class Counterpart:
    """The key that does the same here; or none, and why."""

    key: str | None
    note: str = ""

    def __str__(self) -> str:
        if self.key is None:
            return f"has no counterpart here: {self.note}"
        return f"is `{self.key}` here" + (f" ({self.note})" if self.note else "")


def _use(key: str, note: str = "") -> Counterpart:
    return Counterpart(key, note)


def _none(why: str) -> Counterpart:
    return Counterpart(None, why)


_ACCUMULATION = _none(
    "accumulation follows from `training.global_batch_size`, `training.micro_batch_size` and the number of ranks"
)
_PRECISION = _use("precision", 'one word for the whole run: "fp32", "bf16" or "fp16"')
_STRATEGY = _use("parallel.strategy", f"this version knows: {', '.join(STRATEGY_NAMES)}")
_RECOMPUTE = _use("activation_checkpointing", '"none", "selective" or "full"')
_OFFLOAD = _use("parallel.offload", '"none", "optimizer" or "parameters"')
_INTERVAL = 'with its unit: "500 steps", "1 epoch", or null for never'
_ONE_INTERVAL = "the interval says both when and how often"
_MODEL_CONFIG = "a key of the transformers configuration in it; a pretrained model brings its own"
_RANKS = _none("the launcher says how many ranks there are (`trainer run RECIPE --processes N`, torchrun, srun)")
_ALWAYS_ON = "it is always so"
_DEVICE = "GPUs are used where there are any; CUDA_VISIBLE_DEVICES= hides them"

# transformers.TrainingArguments, and the arguments of its run_glue.py
TRAINING_ARGUMENTS: dict[str, Counterpart] = {
    "per_device_train_batch_size": _use("training.micro_batch_size", "the step's total is training.global_batch_size"),
    "per_gpu_train_batch_size": _use("training.micro_batch_size", "the step's total is training.global_batch_size"),
    "per_device_eval_batch_size": _use("evaluation.batch_size"),
    "eval_batch_size": _use("evaluation.batch_size"),
    "batch_size": _use("training.global_batch_size", "of all ranks; one forward pass: training.micro_batch_size"),
    "auto_find_batch_size": _none("what is learned must not depend on the memory of one device"),
    "gradient_accumulation_steps": _ACCUMULATION,
    "num_train_epochs": _use("training.epochs", "a whole number; max_steps ends inside an epoch"),
    "num_epochs": _use("training.epochs"),
    "learning_rate": _use("optimizer.learning_rate"),
    "weight_decay": _use("optimizer.weight_decay"),
    "adam_beta1": _use("optimizer.betas", "both in one list: [0.9, 0.999]"),
    "adam_beta2": _use("optimizer.betas", "both in one list: [0.9, 0.999]"),
    "adam_epsilon": _use("optimizer.epsilon"),
    "optim": _use("optimizer.name", "adamw or sgd; the fused form is taken where there is one"),
    "lr_scheduler_type": _use("schedule.name"),
    "warmup_ratio": _use("schedule.warmup", "below 1 it is a share of the steps"),
    "warmup_steps": _use("schedule.warmup", "a whole number counts steps"),
    "label_smoothing_factor": _none("this version does not smooth labels"),
    "data_seed": _use("training.seed", "one seed for everything"),
    "full_determinism": _none("one layout gives one result; across layouts see training.layout_invariant_dropout"),
    "output_dir": _use("checkpoint.folder"),
    "overwrite_output_dir": _use("checkpoint.resume", '"auto" goes on, "never" refuses; nothing is overwritten'),
    "resume_from_checkpoint": _use("checkpoint.resume", '"auto" goes on from the newest in checkpoint.folder'),
    "save_steps": _use("checkpoint.every", _INTERVAL),
    "save_strategy": _use("checkpoint.every", _ONE_INTERVAL),
    "save_total_limit": _use("checkpoint.keep"),
    "eval_steps": _use("evaluation.every", _INTERVAL),
    "eval_strategy": _use("evaluation.every", _ONE_INTERVAL),
    "evaluation_strategy": _use("evaluation.every", _ONE_INTERVAL),
    "metric_for_best_model": _use("evaluation.best"),
    "greater_is_better": _none("each metric knows which direction is better"),
    "load_best_model_at_end": _use("evaluation.best", "the metric that decides"),
    "early_stopping_patience": _use("evaluation.patience", "counted in evaluations"),
    "logging_steps": _use("logging.every", _INTERVAL),
    "logging_strategy": _use("logging.every", _ONE_INTERVAL),
    "logging_dir": _none("logs lie in checkpoint.folder"),
    "report_to": _use("logging.to"),
    "run_name": _use("name"),
    "bf16": _PRECISION,
    "fp16": _PRECISION,
    "tf32": _none("fp32 means fp32"),
    "gradient_checkpointing": _RECOMPUTE,
    "torch_compile": _none("this version does not compile the model"),
    "fsdp": _STRATEGY,
    "fsdp_config": _STRATEGY,
    "deepspeed": _STRATEGY,
    "ddp_backend": _none("NCCL on GPUs, gloo on CPUs"),
    "ddp_find_unused_parameters": _none("every parameter must take part in every step"),
    "dataloader_num_workers": _use("data.num_workers"),
    "dataloader_pin_memory": _none(f"{_ALWAYS_ON} on GPUs"),
    "dataloader_drop_last": _none("every row counts; the last batch of an epoch may be smaller"),
    "train_sampling_strategy": _use("data.group_by_length", "true or false"),
    "use_cpu": _none(_DEVICE),
    "no_cuda": _none(_DEVICE),
    "push_to_hub": _none("a run writes to checkpoint.folder only"),
    "model_name_or_path": _use("model.name_or_path"),
    "model_name": _use("model.name_or_path"),
    "tokenizer_name": _use("model.tokenizer"),
    "config_name": _use("model.config", "the configuration itself, for random weights"),
    "trust_remote_code": _none("a recipe never runs code"),
    "dataset_name": _use("data.name", 'with data.source "hub"'),
    "dataset_config_name": _use("data.subset", 'with data.source "hub"'),
    "task_name": _use("data.subset", 'with data.source "hub" and data.name "nyu-mll/glue"'),
    "train_file": _use("data.train", 'with data.source "files"'),
    "validation_file": _use("data.validation", 'with data.source "files"'),
    "max_seq_length": _use("data.max_length"),
    "pad_to_max_length": _none("texts are padded to the longest of their batch"),
    "text_column_names": _use("task.text"),
    "label_column_name": _use("task.label"),
    "mlm": _use("task.type", '"masked_lm"'),
    "mlm_probability": _use("task.mask_probability", 'with task.type "masked_lm"'),
    "metric_name": _use("task.metrics", "a list"),
}

# The JSON file of DeepSpeed; a dot descends into a section.
DEEPSPEED: dict[str, Counterpart] = {
    "train_batch_size": _use("training.global_batch_size"),
    "train_micro_batch_size_per_gpu": _use("training.micro_batch_size"),
    "gradient_clipping": _use("training.max_grad_norm", "null: no clipping"),
    "steps_per_print": _use("logging.every", _INTERVAL),
    "zero_optimization": _STRATEGY,
    "zero_optimization.stage": _STRATEGY,
    "zero_optimization.offload_optimizer": _OFFLOAD,
    "zero_optimization.offload_param": _OFFLOAD,
    "fp16.enabled": _PRECISION,
    "bf16.enabled": _PRECISION,
    "optimizer.type": _use("optimizer.name"),
    "optimizer.params.lr": _use("optimizer.learning_rate"),
    "optimizer.params.betas": _use("optimizer.betas"),
    "optimizer.params.eps": _use("optimizer.epsilon"),
    "optimizer.params.weight_decay": _use("optimizer.weight_decay"),
    "scheduler": _use("schedule"),
    "scheduler.type": _use("schedule.name", "WarmupDecayLR is linear, WarmupCosineLR is cosine"),
    "scheduler.params.warmup_num_steps": _use("schedule.warmup", "a whole number counts steps"),
    "scheduler.params.total_num_steps": _use("training.max_steps"),
    "scheduler.params.warmup_max_lr": _use("optimizer.learning_rate"),
    "prescale_gradients": _none("gradients are summed and divided once, by the whole batch's count"),
    "gradient_predivide_factor": _none("gradients are summed and divided once, by the whole batch's count"),
    "communication_data_type": _none("gradients travel in fp32"),
    "wall_clock_breakdown": _none("`metrics.jsonl` holds the time of every step"),
    "tensorboard": _use("logging.to", '"tensorboard" in the list'),
    "tensorboard.enabled": _use("logging.to", '"tensorboard" in the list'),
    "wandb": _use("logging.to", "this version knows console, jsonl and tensorboard"),
}

# The flags of Megatron-LM
MEGATRON: dict[str, Counterpart] = {
    "--micro-batch-size": _use("training.micro_batch_size"),
    "--global-batch-size": _use("training.global_batch_size"),
    "--train-iters": _use("training.max_steps"),
    "--train-samples": _use("training.max_steps", "in optimizer steps: samples / global_batch_size"),
    "--exit-interval": _use("training.stop_at_step"),
    "--lr": _use("optimizer.learning_rate"),
    "--min-lr": _none("linear and cosine end at 0"),
    "--lr-decay-style": _use("schedule.name"),
    "--lr-decay-iters": _use("training.max_steps", "the schedule ends with the training"),
    "--lr-warmup-iters": _use("schedule.warmup", "a whole number counts steps"),
    "--lr-warmup-fraction": _use("schedule.warmup", "below 1 it is a share of the steps"),
    "--adam-eps": _use("optimizer.epsilon"),
    "--sgd-momentum": _use("optimizer.momentum"),
    "--clip-grad": _use("training.max_grad_norm", "null, not 0, means no clipping"),
    "--seq-length": _use("data.max_length"),
    "--data-path": _use("data.train", 'with data.source "files"'),
    "--num-workers": _use("data.num_workers"),
    "--mask-prob": _use("task.mask_probability", 'with task.type "masked_lm"'),
    "--num-layers": _use("model.config", _MODEL_CONFIG),
    "--hidden-size": _use("model.config", _MODEL_CONFIG),
    "--num-attention-heads": _use("model.config", _MODEL_CONFIG),
    "--hidden-dropout": _use("model.dropout", "every dropout probability of the model"),
    "--attention-dropout": _use("model.dropout", "every dropout probability of the model"),
    "--tokenizer-model": _use("model.tokenizer"),
    "--vocab-file": _use("model.tokenizer", "a folder that holds the tokenizer"),
    "--save": _use("checkpoint.folder"),
    "--load": _use("model.name_or_path", "weights to start from; to resume, the same checkpoint.folder is enough"),
    "--save-interval": _use("checkpoint.every", _INTERVAL),
    "--eval-interval": _use("evaluation.every", _INTERVAL),
    "--eval-iters": _none("the whole validation split is evaluated"),
    "--log-interval": _use("logging.every", _INTERVAL),
    "--tensorboard-dir": _none("logs lie in checkpoint.folder"),
    "--use-distributed-optimizer": _STRATEGY,
    "--use-torch-fsdp2": _STRATEGY,
    "--data-parallel-sharding-strategy": _STRATEGY,
    "--tensor-model-parallel-size": _use("parallel.tensor"),
    "--pipeline-model-parallel-size": _use("parallel.pipeline.stages"),
    "--num-layers-per-virtual-pipeline-stage": _use("parallel.pipeline.stages_per_rank", "with interleaved_1f1b"),
    "--num-virtual-stages-per-pipeline-rank": _use("parallel.pipeline.stages_per_rank", "with interleaved_1f1b"),
    "--sequence-parallel": _use("parallel.sequence"),
    "--context-parallel-size": _none("this version does not split attention over ranks by positions"),
    "--recompute-granularity": _RECOMPUTE,
}

# The YAML file of `accelerate config`
ACCELERATE: dict[str, Counterpart] = {
    "mixed_precision": _PRECISION,
    "downcast_bf16": _PRECISION,
    "distributed_type": _STRATEGY,
    "num_processes": _RANKS,
    "num_machines": _RANKS,
    "machine_rank": _RANKS,
    "main_process_ip": _RANKS,
    "main_process_port": _RANKS,
    "rdzv_backend": _RANKS,
    "gpu_ids": _none("the launcher or CUDA_VISIBLE_DEVICES says which GPUs are used"),
    "compute_environment": _none("a recipe says what is learned, not where"),
    "dynamo_config": _none("this version does not compile the model"),
    "dynamo_backend": _none("this version does not compile the model"),
    "fsdp_config.fsdp_sharding_strategy": _STRATEGY,
    "fsdp_config.fsdp_reshard_after_forward": _use("parallel.reshard_after_forward"),
    "deepspeed_config": _STRATEGY,
    "deepspeed_config.zero_stage": _STRATEGY,
    "deepspeed_config.gradient_accumulation_steps": _ACCUMULATION,
    "deepspeed_config.gradient_clipping": _use("training.max_grad_norm", "null: no clipping"),
    "megatron_lm_config": _use("parallel.tensor", "the trainer's own blocks; Megatron-LM is not needed"),
    "megatron_lm_config.megatron_lm_tp_degree": _use("parallel.tensor"),
    "megatron_lm_config.megatron_lm_pp_degree": _use("parallel.pipeline.stages"),
    "megatron_lm_config.megatron_lm_num_micro_batches": _use("parallel.pipeline.microbatches"),
}


def _normal(spelling: str) -> str:
    return spelling.lstrip("-").replace("-", "_")


@cache
def _table() -> dict[str, Counterpart]:
    tables = (TRAINING_ARGUMENTS, DEEPSPEED, MEGATRON, ACCELERATE)
    return {_normal(spelling): row for table in tables for spelling, row in table.items()}


def counterpart(path: str) -> Counterpart | None:
    """What stands here for another tool's key; None where the spelling is no tool's.

    `path` is a dotted key path, dashes or underscores, with or without leading dashes. The longest known ending
    counts, so that `parallel.zero_optimization.stage` is recognised as well as `zero_optimization.stage`.
    """
    parts = _normal(path).split(".")
    return next((row for start in range(len(parts)) if (row := _table().get(".".join(parts[start:])))), None)
