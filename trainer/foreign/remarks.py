"""Remarks that rows of several tools share."""

from __future__ import annotations

from trainer.recipe.strategies import STRATEGY_NAMES

INTERVAL = 'with its unit: "500 steps", "1 epoch", or null for never'
ONE_INTERVAL = "the interval says both when and how often"
WORD_OF_PRECISION = 'one word for the whole run: "fp32", "bf16" or "fp16"'
STRATEGIES = f"this version knows: {', '.join(STRATEGY_NAMES)}"
RECOMPUTE = '"none", "selective" or "full"'
OFFLOAD = '"none", "optimizer" or "parameters"'
MODEL_CONFIG = "a key of the transformers configuration in it; a pretrained model brings its own"
STEP_TOTAL = "the step's total is training.global_batch_size"
NO_CLIPPING = "null, not 0, means no clipping"
WHOLE_STEPS = "a whole number counts steps"
SHARE = "below 1 it is a share of the steps"
BOTH_BETAS = "both in one list: [0.9, 0.999]"
HUB = 'with data.source "hub"'
FILES = 'with data.source "files"'
MASKED_LM = 'with task.type "masked_lm"'

ACCUMULATION = (
    "accumulation follows from `training.global_batch_size`, `training.micro_batch_size` and the number of ranks"
)
RANKS = "the launcher says how many ranks there are (`trainer run RECIPE --processes N`, torchrun, srun)"
DEVICE = "GPUs are used where there are any; CUDA_VISIBLE_DEVICES= hides them"
ALWAYS_ON = "it is always so"
NOT_COMPILED = "this version does not compile the model"
OWN_FOLDER = "a run writes to checkpoint.folder only"
NO_CODE = "a recipe never runs code"
ONE_DENOMINATOR = "gradients are summed and divided once, by the whole batch's count"
NO_CONTEXT_PARALLEL = "this version does not split attention over ranks by positions"
NO_FP8 = "this version trains in fp32, bf16 or fp16"
NO_TPU = "this version runs on CUDA GPUs and on CPUs"
NO_NVME = 'offload goes to CPU memory only: `parallel.offload` "optimizer" or "parameters"'
NO_EXPERTS = "this version has no expert parallelism"
WRAPPED_BY_FAMILY = "each layer of the model is a unit; the table of families, or the model's own list, names them"
OWN_CHECKPOINTS = "checkpoints are the trainer's own, sharded, verified and independent of the layout"
