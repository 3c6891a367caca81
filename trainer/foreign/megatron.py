"""The flags of Megatron-LM. It is no dependency, so no test can compare them with a version of it."""

from __future__ import annotations

from trainer.foreign import remarks as say
from trainer.foreign.counterpart import Counterpart, alike, launcher, mapped, none, renamed, same

_MODEL = mapped("model.config", note=say.MODEL_CONFIG)
_OVERLAP = none("collectives are overlapped by torch, or by DeepSpeed, as the strategy does")

MEGATRON: dict[str, Counterpart] = {
    # layout
    "--tensor-model-parallel-size": renamed("parallel.tensor", 1),
    "--sequence-parallel": renamed("parallel.sequence", False),
    "--pipeline-model-parallel-size": renamed("parallel.pipeline.stages", 1),
    "--num-layers-per-virtual-pipeline-stage": mapped(
        "parallel.pipeline.stages_per_rank", note="with interleaved_1f1b"
    ),
    "--num-virtual-stages-per-pipeline-rank": renamed(
        "parallel.pipeline.stages_per_rank", note="with interleaved_1f1b"
    ),
    "--decoder-first-pipeline-num-layers": mapped("parallel.pipeline.split", note="the first layer of each stage"),
    "--decoder-last-pipeline-num-layers": mapped("parallel.pipeline.split", note="the first layer of each stage"),
    "--context-parallel-size": none(say.NO_CONTEXT_PARALLEL),
    "--expert-model-parallel-size": none(say.NO_EXPERTS),
    "--use-distributed-optimizer": mapped("parallel.strategy", note="zero1, or fsdp with a pipeline"),
    "--use-torch-fsdp2": mapped("parallel.strategy", note="fsdp"),
    "--use-megatron-fsdp": mapped("parallel.strategy", note="fsdp"),
    "--data-parallel-sharding-strategy": mapped("parallel.strategy", note=say.STRATEGIES),
    "--optimizer-cpu-offload": mapped("parallel.offload", note='"optimizer", under zero1 to zero3'),
    **alike(_OVERLAP, "--overlap-grad-reduce", "--overlap-param-gather", "--tp-comm-overlap"),
    "--distributed-backend": same("NCCL on GPUs, gloo on CPUs", "nccl"),
    "--distributed-timeout-minutes": mapped("parallel.stall_timeout", note='a time with its unit: "10 minutes"'),
    "--nproc-per-node": launcher(say.RANKS),
    "--nnodes": launcher(say.RANKS),
    # memory and precision
    "--recompute-granularity": mapped("activation_checkpointing", note=say.RECOMPUTE),
    "--recompute-activations": mapped("activation_checkpointing", note='"selective"'),
    **alike(none("every layer is recomputed by itself"), "--recompute-method", "--recompute-num-layers"),
    "--bf16": mapped("precision", note='"bf16"'),
    "--fp16": mapped("precision", note='"fp16"'),
    **alike(none(say.NO_FP8), "--fp8-format"),
    **alike(
        none("the loss scale of fp16 is the trainer's own"), "--initial-loss-scale", "--loss-scale", "--min-loss-scale"
    ),
    # batch and amount
    "--micro-batch-size": renamed("training.micro_batch_size"),
    "--global-batch-size": renamed("training.global_batch_size"),
    "--rampup-batch-size": none("the batch has one size throughout"),
    "--train-iters": renamed("training.max_steps"),
    "--train-samples": mapped("training.max_steps", note="in optimizer steps: samples / global_batch_size"),
    "--exit-interval": renamed("training.stop_at_step"),
    "--exit-duration-in-mins": none("a signal saves and leaves with exit code 75, which batch systems can send"),
    # learning
    "--lr": renamed("optimizer.learning_rate"),
    "--min-lr": none("linear and cosine end at 0"),
    "--lr-decay-style": mapped("schedule.name"),
    "--lr-decay-iters": mapped("training.max_steps", note="the schedule ends with the training"),
    "--lr-warmup-iters": renamed("schedule.warmup", note=say.WHOLE_STEPS),
    "--lr-warmup-fraction": mapped("schedule.warmup", note=say.SHARE),
    "--optimizer": mapped("optimizer.name", note='"adam" with weight decay is adamw'),
    "--adam-beta1": mapped("optimizer.betas", note=say.BOTH_BETAS),
    "--adam-beta2": mapped("optimizer.betas", note=say.BOTH_BETAS),
    "--adam-eps": renamed("optimizer.epsilon"),
    "--sgd-momentum": renamed("optimizer.momentum"),
    "--weight-decay": renamed("optimizer.weight_decay"),
    "--clip-grad": mapped("training.max_grad_norm", note=say.NO_CLIPPING),
    "--seed": renamed("training.seed", 1234),
    # model and data
    **alike(_MODEL, "--num-layers", "--hidden-size", "--num-attention-heads", "--ffn-hidden-size"),
    "--hidden-dropout": mapped("model.dropout", note="every dropout probability of the model"),
    "--attention-dropout": mapped("model.dropout", note="every dropout probability of the model"),
    "--tokenizer-model": mapped("model.tokenizer"),
    "--vocab-file": mapped("model.tokenizer", note="a folder that holds the tokenizer"),
    "--seq-length": renamed("data.max_length"),
    "--data-path": mapped("data.train", note=say.FILES),
    "--split": mapped("data.validation", note="a split or file of its own"),
    "--num-workers": renamed("data.num_workers", 2),
    "--mask-prob": renamed("task.mask_probability", note=say.MASKED_LM),
    # running
    "--save": mapped("checkpoint.folder"),
    "--load": mapped(
        "model.name_or_path", note="weights to start from; to resume, the same checkpoint.folder is enough"
    ),
    "--save-interval": mapped("checkpoint.every", note=say.INTERVAL),
    "--async-save": mapped("checkpoint.asynchronous", note="true is the default"),
    "--eval-interval": mapped("evaluation.every", note=say.INTERVAL),
    "--eval-iters": none("the whole validation split is evaluated"),
    "--log-interval": mapped("logging.every", note=say.INTERVAL),
    "--tensorboard-dir": none("logs lie in checkpoint.folder"),
    "--wandb-project": mapped("logging.project", note='with "wandb" in `logging.to`'),
}
