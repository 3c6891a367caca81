"""The keys of `parallel.deepspeed`: those that a recipe may set, and the reasons against the others.

Unknown keys are errors, because DeepSpeed ignores unknown top-level keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

# Keys that the trainer sets, each with the recipe's key for it; None if the recipe has no such key.
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
    ("communication_data_type",): "parallel.communication.gradients",
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
_UNREAD = "has no effect here: {}; remove it"
# Other keys of DeepSpeed that are errors, each with the reason.
_REFUSED: dict[tuple[str, ...], str] = {
    ("data_types",): "would change the training: gradients are summed in fp32; remove it",
    ("aio",): _UNREAD.format("nothing is offloaded to NVMe"),
    ("disable_allgather",): _UNREAD.format("DeepSpeed ignores it"),
    ("seq_parallel_communication_data_type",): _UNREAD.format("DeepSpeed's sequence parallelism is not used"),
    ("zero_optimization", "load_from_fp32_weights"): _UNREAD.format("DeepSpeed's checkpoints are not used"),
    # DeepSpeed 0.19 computes the map from parameters to partitions without the new order.
    ("zero_optimization", "round_robin_gradients"): (
        "would mix up the tensors of checkpoints and exported models, because of a bug in DeepSpeed; remove it"
    ),
    # DeepSpeed 0.19 calls `record_stream` on CPU gradients.
    ("zero_optimization", "stage3_module_granularity_threshold"): (
        "is not supported, because a bug in DeepSpeed fails steps on CPUs; remove it"
    ),
    ("zero_optimization", "zero_hpz_partition_size"): "is not supported, like the rest of ZeRO++; remove it",
}
# Top-level keys that a recipe may set. DeepSpeed's other keys enable other engines, optimizers or tools.
FREE_KEYS = (
    "comms_logger",
    "dump_state",
    "flops_profiler",
    "memory_breakdown",
    "steps_per_print",
    "timers",
    "wall_clock_breakdown",
    "zero_optimization",
)
# DeepSpeed validates these itself; the list finds typos before the run and suggests the right key.
FREE_ZERO_KEYS = (
    "allgather_bucket_size",
    "allgather_partitions",
    "contiguous_gradients",
    "log_trace_cache_warnings",
    "overlap_comm",
    "reduce_bucket_size",
    "reduce_scatter",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_model_persistence_threshold",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
    "sub_group_size",
    "use_all_reduce_for_fetch_params",
    "use_multi_rank_bucket_allreduce",
)


def refused_keys(extra: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the path of each invalid key of `parallel.deepspeed`, and the reason."""
    zero = extra.get("zero_optimization", {})
    inner = zero if isinstance(zero, Mapping) else {}
    paths: list[tuple[str, ...]] = [*((key,) for key in extra), *(("zero_optimization", key) for key in inner)]
    for path in paths:
        known = FREE_KEYS if len(path) == 1 else FREE_ZERO_KEYS
        if path in _OWNED:
            ours = _OWNED[path]
            fixed = "is set by the trainer and cannot be changed"
            yield path, f"is set from `{ours}`; change it there" if ours else fixed
        elif path in _REFUSED:
            yield path, _REFUSED[path]
        elif path[-1] not in known:
            yield path, _unknown(path[-1], known)
    if not isinstance(zero, Mapping):
        yield ("zero_optimization",), "must be an object"


def _unknown(key: str, known: tuple[str, ...]) -> str:
    near = get_close_matches(key, known, n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"valid keys are {', '.join(known)}"
    return f"is not a DeepSpeed key that can be set here; {hint}"
