"""Flags of Megatron-LM, which is not a dependency, so that no test compares them with a version of it."""

from __future__ import annotations

from trainer.recipe.foreign import remarks as say
from trainer.recipe.foreign.counterpart import Counterpart, alike, launcher, mapped, none, renamed, same

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
    **alike(
        mapped("parallel.pipeline.split", note="the first layer of each stage"),
        "--decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers",
    ),
    "--context-parallel-size": renamed("parallel.context", 1, note=say.EXCHANGES_HEADS),
    "--expert-model-parallel-size": none(say.NO_EXPERTS),
    "--use-distributed-optimizer": mapped("parallel.strategy", note="zero1, or fsdp with a pipeline"),
    **alike(mapped("parallel.strategy", note="fsdp"), "--use-torch-fsdp2 --use-megatron-fsdp"),
    "--data-parallel-sharding-strategy": mapped("parallel.strategy", note=say.STRATEGIES),
    "--optimizer-cpu-offload": mapped("parallel.offload", note='"optimizer", under zero1 to zero3'),
    **alike(
        none("torch or DeepSpeed overlaps the collectives of each strategy"),
        "--overlap-grad-reduce --overlap-param-gather --tp-comm-overlap",
    ),
    "--distributed-backend": same(say.BACKEND, "nccl"),
    "--distributed-timeout-minutes": mapped("parallel.stall_timeout", note=say.TIME),
    **alike(launcher(say.RANKS), "--nproc-per-node --nnodes"),
    # memory and precision
    "--recompute-granularity": mapped("activation_checkpointing", note=say.RECOMPUTE),
    "--recompute-activations": mapped("activation_checkpointing", note='"selective"'),
    **alike(none(say.EACH_LAYER), "--recompute-method --recompute-num-layers"),
    "--bf16": mapped("precision", note='"bf16"'),
    "--fp16": mapped("precision", note='"fp16"'),
    "--fp8-format": none(say.NO_FP8),
    **alike(none(say.OWN_LOSS_SCALE), "--initial-loss-scale --loss-scale --min-loss-scale"),
    # batch and amount
    "--micro-batch-size": renamed("training.micro_batch_size"),
    "--global-batch-size": renamed("training.global_batch_size"),
    "--rampup-batch-size": none("the batch size is constant"),
    "--train-iters": renamed("training.max_steps"),
    "--train-samples": mapped("training.max_steps", note="in optimizer steps: samples / global_batch_size"),
    "--exit-interval": renamed("training.stop_at_step"),
    "--exit-duration-in-mins": none("a signal, which batch systems can send, saves and exits with code 75"),
    # learning
    "--lr": renamed("optimizer.learning_rate"),
    "--min-lr": mapped("schedule.min_rate", note="as a share of the peak"),
    "--lr-decay-style": mapped("schedule.name", note="WSD is warmup_stable_decay, inverse-square-root inverse_sqrt"),
    "--lr-wsd-decay-style": mapped("schedule.decay_shape", note="linear or cosine"),
    "--lr-wsd-decay-iters": renamed("schedule.decay", note=say.WHOLE_STEPS),
    "--lr-decay-iters": mapped("training.max_steps", note="the schedule ends with the training"),
    "--lr-warmup-iters": renamed("schedule.warmup", note=say.WHOLE_STEPS),
    "--lr-warmup-fraction": mapped("schedule.warmup", note=say.SHARE),
    "--optimizer": mapped("optimizer.name", note='"adam" with weight decay is adamw'),
    **alike(mapped("optimizer.betas", note=say.BOTH_BETAS), "--adam-beta1 --adam-beta2"),
    "--adam-eps": renamed("optimizer.epsilon"),
    "--sgd-momentum": renamed("optimizer.momentum"),
    "--weight-decay": renamed("optimizer.weight_decay"),
    "--clip-grad": mapped("training.max_grad_norm", note=say.NO_CLIPPING),
    "--seed": renamed("training.seed", 1234),
    # model and data
    **alike(
        mapped("model.config", note=say.MODEL_CONFIG),
        "--num-layers --hidden-size --num-attention-heads --ffn-hidden-size",
    ),
    **alike(
        mapped("model.dropout", note="all dropout probabilities of the model"), "--hidden-dropout --attention-dropout"
    ),
    "--tokenizer-model": mapped("model.tokenizer"),
    "--vocab-file": mapped("model.tokenizer", note="the folder of the tokenizer"),
    "--seq-length": renamed("data.max_length"),
    "--data-path": mapped("data.train", note=say.FILES),
    "--split": mapped("data.validation", note="a separate split or file"),
    "--num-workers": renamed("data.num_workers", 2),
    "--mask-prob": renamed("task.mask_probability", note=say.MASKED_LM),
    # running
    "--save": mapped("checkpoint.folder"),
    "--load": mapped("model.name_or_path", note="initial weights; to resume, keep checkpoint.folder"),
    "--save-interval": mapped("checkpoint.every", note=say.INTERVAL),
    "--async-save": mapped("checkpoint.asynchronous", note="true is the default"),
    "--eval-interval": mapped("evaluation.every", note=say.INTERVAL),
    "--eval-iters": none("the whole validation split is evaluated"),
    "--log-interval": mapped("logging.every", note=say.INTERVAL),
    "--tensorboard-dir": none("logs are in checkpoint.folder"),
    "--wandb-project": mapped("logging.project", note='with "wandb" in `logging.to`'),
}
