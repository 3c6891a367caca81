"""The DeepSpeed configuration of a recipe; `trainer check` prints it.

Every key for averaging and clipping is explicit, because DeepSpeed's defaults change the training: it clips at 1.0.
"""

from __future__ import annotations

from typing import Any, cast

from trainer.features.deepspeed.section import DeepSpeedKeys
from trainer.recipe.plan import RunPlan

# DeepSpeed's default of 5e8 elements allocates 2 GB on every rank, for any model.
_BUCKET_ELEMENTS = 16 * 1024**2


def deepspeed_config(plan: RunPlan) -> dict[str, Any]:
    """Return the configuration for `deepspeed.initialize`.

    `gradient_accumulation_steps` is 1, because the engine marks the accumulation boundary: the last batch of an epoch
    may hold fewer microbatches. fp16 and bf16 are off, because the trainer's own autocast and loss scaling serve every
    strategy.
    """
    stage, parallel = 1 + plan.strategy.cuts_gradients + plan.strategy.cuts_parameters, plan.recipe.parallel
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_scatter": True,
        "overlap_comm": False,
        "contiguous_gradients": True,
        "reduce_bucket_size": _BUCKET_ELEMENTS,
        "offload_optimizer": {"device": "cpu" if parallel.offload != "none" else "none"},
    }
    if stage == 3:
        zero["offload_param"] = {"device": "cpu" if parallel.offload == "parameters" else "none"}
        # By default, parameters of fewer than 100,000 elements stay gathered on each rank between their uses.
        zero["stage3_param_persistence_threshold"] = 0
        # DeepSpeed's linear layer adds the bias to the product in place. Selective checkpointing keeps the product, so
        # the recomputation would add the bias again.
        zero["memory_efficient_linear"] = plan.recipe.activation_checkpointing != "selective"
    extra = dict(cast(DeepSpeedKeys, parallel).deepspeed)
    zero |= extra.pop("zero_optimization", {})
    return {
        "train_batch_size": plan.batch.global_batch_size,
        # DeepSpeed requires that this number, the steps of accumulation and the data ranks multiply to the first one.
        "train_micro_batch_size_per_gpu": plan.batch.rank_batch_size,
        "gradient_accumulation_steps": 1,
        # DeepSpeed clips if this number is above 0, and takes 1.0 if the key is missing.
        "gradient_clipping": plan.recipe.training.max_grad_norm or 0.0,
        "communication_data_type": parallel.communication.gradients,
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "steps_per_print": None,
        **extra,
    }
