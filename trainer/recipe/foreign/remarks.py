"""Notes that rows of several tables share."""

from __future__ import annotations

from trainer.recipe.strategies import STRATEGY_NAMES

INTERVAL = 'with a unit: "500 steps", "1 epoch", or null for never'
ONE_INTERVAL = "one interval replaces strategy and steps"
WORD_OF_PRECISION = '"fp32", "bf16" or "fp16"'
STRATEGIES = f"one of {', '.join(STRATEGY_NAMES)}"
RECOMPUTE = '"none", "selective" or "full"'
OFFLOAD = '"none", "optimizer" or "parameters"'
MODEL_CONFIG = "a key of the transformers configuration, for random weights"
STEP_TOTAL = "the step's total is training.global_batch_size"
NO_CLIPPING = "null, not 0, disables clipping"
WHOLE_STEPS = "an integer is a number of steps"
SCHEDULE_KEYS = "min_rate is a share of the peak; cycles, power, timescale, decay and decay_shape"
SHARE = "a number below 1 is a fraction of the steps"
BOTH_BETAS = "a list: [0.9, 0.999]"
TIME = 'a time with its unit: "10 minutes"'
HUB = 'with data.source "hub"'
FILES = 'with data.source "files"'
MASKED_LM = 'with task.type "masked_lm"'

ACCUMULATION = (
    "accumulation follows from `training.global_batch_size`, `training.micro_batch_size` and the number of ranks"
)
RANKS = "the launcher sets the number of ranks (`trainer run RECIPE --processes N`, torchrun, srun)"
DEVICE = "GPUs are used if available; CUDA_VISIBLE_DEVICES= hides them"
BACKEND = "NCCL on GPUs, gloo on CPUs"
ALWAYS_ON = "always enabled"
NOT_COMPILED = "see the key compile, which compiles each kind of layer once"
OWN_FOLDER = "a run writes only to checkpoint.folder"
NO_CODE = "a recipe never runs code"
ONE_DENOMINATOR = "gradients are summed and divided once, by the count of the global batch"
BATCH_MEAN = "the loss is the mean over all valid labels of the global batch"
EXCHANGES_HEADS = "ranks share heads, as in DeepSpeed-Ulysses, and form rings where heads do not suffice"
OWN_CONTEXT = "the number of heads decides between exchange and ring; any length works"
NO_FP8 = "the trainer supports fp32, bf16 and fp16"
FP32_STATE = "the optimizer state is fp32, or 8 bits with `adamw_8bit`"
OWN_LOSS_SCALE = "the trainer has its own fp16 loss scale, the same under every strategy"
NO_TPU = "the trainer runs on CUDA GPUs and CPUs"
NO_NVME = 'offload uses CPU memory only: `parallel.offload` "optimizer" or "parameters"'
PLAIN_OFFLOAD = "only DeepSpeed's standard offload is supported"
NO_EXPERTS = "expert parallelism is not supported"
EACH_LAYER = "each layer is recomputed separately"
WRAPPED_BY_FAMILY = "each layer of the model is a unit; the model family, or the model itself, names its layers"
OWN_PART = "each rank reads only its part of the weights"
ONE_READER = f'{OWN_PART}; with `parallel.load` "broadcast", one rank of each node reads for the others'
WHOLE_MODEL = "a run always exports the whole model"
OWN_CHECKPOINTS = "the trainer has its own checkpoints: sharded, verified and independent of the layout"
EVERY_ROW = "every row counts; the last batch of an epoch may be smaller"
NO_LOG_LEVELS = "log levels are not supported"
STALL = "parallel.stall_timeout reports a rank that makes no progress"
