"""The DeepSpeed configuration of a recipe: the whole of it, with every averaging and clipping key written out.

DeepSpeed fills what is missing with defaults that change the training (it clips at 1.0 unless told otherwise) and
ignores top-level keys that it does not know, so nothing is left to it here. `trainer check` prints the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.recipe.plan import RunPlan

# DeepSpeed's default, 5e8 elements, is a buffer of 2 GB on every rank, whatever the size of the model.
_BUCKET_ELEMENTS = 16 * 1024**2

# Keys that follow from the recipe, and the recipe's own key for each (None: there is none, and no need).
_OWNED: dict[tuple[str, ...], str | None] = {
    ("train_batch_size",): "training.global_batch_size",
    ("train_micro_batch_size_per_gpu",): "training.micro_batch_size",
    ("gradient_accumulation_steps",): "training.micro_batch_size",
    ("gradient_clipping",): "training.max_grad_norm",
    ("optimizer",): "optimizer",
    ("scheduler",): "schedule",
    ("fp16",): "precision",
    ("bf16",): "precision",
    ("torch_autocast",): "precision",
    ("amp",): "precision",
    ("activation_checkpointing",): "activation_checkpointing",
    ("prescale_gradients",): None,
    ("gradient_predivide_factor",): None,
    ("zero_allow_untested_optimizer",): None,
    ("zero_force_ds_cpu_optimizer",): None,
    ("managed_gradient_accumulation",): None,
    ("zero_optimization", "stage"): "parallel.strategy",
    ("zero_optimization", "offload_optimizer"): "parallel.offload",
    ("zero_optimization", "offload_param"): "parallel.offload",
    ("zero_optimization", "cpu_offload"): "parallel.offload",
    ("zero_optimization", "cpu_offload_params"): "parallel.offload",
    ("zero_optimization", "memory_efficient_linear"): "activation_checkpointing",
}
# Top-level keys that a recipe may add. DeepSpeed knows more, which switch on other engines, optimizers or tools.
FREE_KEYS = (
    "aio",
    "comms_logger",
    "communication_data_type",
    "data_types",
    "disable_allgather",
    "dump_state",
    "flops_profiler",
    "memory_breakdown",
    "seq_parallel_communication_data_type",
    "steps_per_print",
    "timers",
    "wall_clock_breakdown",
    "zero_optimization",
)
# DeepSpeed checks these itself, by a schema of its own; the list is for the remedy, and to find a slip before a run.
FREE_ZERO_KEYS = (
    "allgather_bucket_size",
    "allgather_partitions",
    "contiguous_gradients",
    "load_from_fp32_weights",
    "log_trace_cache_warnings",
    "overlap_comm",
    "reduce_bucket_size",
    "reduce_scatter",
    "round_robin_gradients",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_model_persistence_threshold",
    "stage3_module_granularity_threshold",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
    "sub_group_size",
    "use_all_reduce_for_fetch_params",
    "use_multi_rank_bucket_allreduce",
    "zero_hpz_partition_size",
)


def refused_keys(extra: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """The keys of `parallel.deepspeed` that may not stand there, each with what is wrong with it."""
    for key, value in extra.items():
        if (key,) in _OWNED:
            yield (key,), _owned((key,))
        elif key not in FREE_KEYS:
            yield (key,), _unknown(key, FREE_KEYS)
        elif key == "zero_optimization" and isinstance(value, Mapping):
            for inner in value:
                if (key, inner) in _OWNED:
                    yield (key, inner), _owned((key, inner))
                elif inner not in FREE_ZERO_KEYS:
                    yield (key, inner), _unknown(inner, FREE_ZERO_KEYS)
        elif key == "zero_optimization":
            yield (key,), "must be an object"


def _owned(path: tuple[str, ...]) -> str:
    ours = _OWNED[path]
    return f"follows from `{ours}`; set it there" if ours else "is set by the trainer and cannot be changed"


def _unknown(key: str, known: tuple[str, ...]) -> str:
    near = get_close_matches(key, known, n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"there are {', '.join(known)}"
    return f"is not a key of DeepSpeed that may be set here; {hint}"


def deepspeed_config(plan: RunPlan) -> dict[str, Any]:
    """The whole configuration for `deepspeed.initialize`, or {} where the strategy is not DeepSpeed's.

    The engine marks the accumulation boundary itself, because a ragged batch holds fewer microbatches: DeepSpeed is
    told of one. It is told of fp32, because autocast and loss scaling are the trainer's, the same under every strategy.
    """
    stage, parallel = plan.strategy.zero_stage, plan.recipe.parallel
    if not stage:
        return {}
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
        zero["stage3_param_persistence_threshold"] = 0
        # DeepSpeed's own linear adds the bias to the product in place. Where the product is kept for a recomputation,
        # it would be added a second time.
        zero["memory_efficient_linear"] = plan.recipe.activation_checkpointing != "selective"
    extra = dict(parallel.deepspeed)
    zero |= extra.pop("zero_optimization", {})
    return {
        "train_batch_size": plan.batch.global_batch_size,
        "train_micro_batch_size_per_gpu": plan.batch.rank_batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": plan.recipe.training.max_grad_norm or 0.0,
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
