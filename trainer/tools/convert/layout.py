"""Conversion of the layout and the precision: strategy, degrees, offload, activation checkpointing."""

from __future__ import annotations

import math
from typing import Any

from trainer.recipe.strategies import STRATEGIES
from trainer.tools.convert.draft import Draft, Outcome
from trainer.tools.convert.foreign.values import Todo
from trainer.tools.convert.sources import Item, Tool

_TA, _DS, _AC = Tool.TRAINING_ARGUMENTS, Tool.DEEPSPEED, Tool.ACCELERATE
_STRATEGY, _OFFLOAD, _RESHARD = "parallel.strategy", "parallel.offload", "parallel.reshard_after_forward"
_HYBRID = "shards over the ranks of a node: `parallel.shard` auto"
_SHARDINGS: dict[str, tuple[str, bool, str]] = {  # strategy, reshard after forward, remark; torch counts from 1
    "FULL_SHARD": ("fsdp", True, ""),
    "SHARD_GRAD_OP": ("fsdp", False, ""),
    "NO_SHARD": ("ddp", True, "the same as NO_SHARD"),
    "HYBRID_SHARD": ("hsdp", True, _HYBRID),
    "HYBRID_SHARD_ZERO2": ("hsdp", False, _HYBRID),
}
_ZERO_STAGES = {0: "ddp"} | {
    1 + row.cuts_gradients + row.cuts_parameters: row.name for row in STRATEGIES.values() if row.package == "deepspeed"
}
_PLAIN_RANKS = ("MULTI_GPU", "MULTI_CPU")
_SECTIONS = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config", "MEGATRON_LM": "megatron_lm_config"}
_DEGREES = "parallelism_config.parallelism_config_"
_AUTOCAST_TYPES = {"bfloat16": "bf16", "float16": "fp16", "bf16": "bf16", "fp16": "fp16"}


def unread_sections(draft: Draft) -> None:
    """Report the keys of sections that the tool ignores."""
    sources = draft.sources
    fsdp, kind = sources.get(_TA, "fsdp"), _distributed_type(draft)
    if fsdp is not None and fsdp.is_default:
        draft.unread("fsdp is not set", *sources.inside(_TA, "fsdp_config"))
    for other, section in _SECTIONS.items():
        if kind is not None and other != kind:
            draft.unread(f"distributed_type is {kind}", *sources.inside(_AC, section))


def layout(draft: Draft) -> None:
    _of_arguments(draft)
    _of_accelerate(draft)
    _of_deepspeed(draft)


def offload_and_deepspeed(draft: Draft) -> None:
    """Complete the layout after the rows that set `parallel.offload`."""
    draft.combine(_OFFLOAD, {"optimizer", "parameters"}, "parameters")  # includes the optimizer
    _deepspeed_keys(draft)


def precision(draft: Draft) -> None:
    sources = draft.sources
    _precision_of_switches(draft, [item for key in ("bf16", "fp16") if (item := sources.get(_TA, key))], "")
    sections = (sources.written(_DS, f"{key}.enabled") for key in ("bf16", "bfloat16", "fp16"))
    switches = [item for item in sections if item and not item.is_auto]
    _precision_of_switches(draft, switches, "weights and gradients stay in fp32; those of DeepSpeed have that type")
    _autocast(draft)
    item, old = sources.get(_AC, "mixed_precision"), sources.written(_AC, "fp16")
    if old is not None and (item is None or item.origin is None):
        _precision_of_switches(draft, [old], "")
    elif item is not None:
        draft.unread("mixed_precision has precedence", old)
        value = "no" if item.value in (None, False) else item.value  # YAML reads an unquoted no as false
        if value in ("no", "bf16", "fp16"):
            draft.take("precision", "fp32" if value == "no" else value, item)
        else:
            draft.refuse("precision", f"{value} has no counterpart: fp32, bf16 or fp16", item)


def _precision_of_switches(draft: Draft, switches: list[Item], note: str) -> None:
    on = [item for item in switches if draft.flag(item)]
    if len(on) > 1:
        draft.refuse("precision", f"{' and '.join(item.key for item in on)} are both on", *on)
    elif switches:
        value = "fp32" if not on else "fp16" if "fp16" in on[0].key else "bf16"
        draft.take("precision", value, *switches, note=note if on else "", differs=bool(on and note))


def _autocast(draft: Draft) -> None:
    switch, dtype = (draft.sources.written(_DS, f"torch_autocast.{key}") for key in ("enabled", "dtype"))
    if switch is None or not draft.flag(switch):
        draft.unread("torch_autocast is off", dtype)
        return
    value = _AUTOCAST_TYPES.get(str(dtype.value).removeprefix("torch.") if dtype else "")
    wrong = Todo("torch_autocast needs the type bf16 or fp16")
    draft.take("precision", value or wrong, switch, dtype)


# TrainingArguments


def _of_arguments(draft: Draft) -> None:
    sources = draft.sources
    _named_file(draft, sources.written(_TA, "deepspeed"), sources.files.get(_DS), "give that file too")
    item = sources.get(_TA, "fsdp")
    if item is None or item.is_default:
        return
    path = sources.written(_TA, "fsdp_config")
    if path is not None and isinstance(path.value, str):
        read = "" if any(key.startswith("fsdp_config.") for key in sources.items[_TA]) else None
        _named_file(draft, path, read, "write its keys into this file")
    words = set(str(item.value).replace(",", " ").split())
    if isinstance(item.value, list):
        words = set(map(str, item.value))
    shardings = {sharding.lower() for sharding in _SHARDINGS} & words
    strange = words - shardings - {"auto_wrap", "offload", "True", "true"}
    if strange:
        draft.refuse(_STRATEGY, f"fsdp {' '.join(sorted(strange))} is unknown", item)
        return
    _take_sharding(draft, min(shardings, default="full_shard").upper(), item)
    if "offload" in words:
        draft.take(_OFFLOAD, "parameters", item)
    _fsdp_keys(draft, _TA, "fsdp_config.")


def _named_file(draft: Draft, item: Item | None, read: str | None, remedy: str, *others: Item) -> bool:
    """Report a key that names a file, and return whether it does; `read` is the name of that file, if it was read."""
    if item is None or item.value is None:
        return False
    if read is not None:
        draft.say(item, Outcome.SAME, f"is converted too: {read}" if read else "is converted too")
    else:
        draft.refuse(_STRATEGY, f"{item.value} does not exist; {remedy}", *others, item)
    return True


# accelerate


def _distributed_type(draft: Draft) -> str | None:
    item = draft.sources.get(_AC, "distributed_type")
    if item is None:
        return None
    return "NO" if item.value is False else str(item.value)  # YAML reads an unquoted NO as false


def _of_accelerate(draft: Draft) -> None:
    sources = draft.sources
    item, kind = sources.get(_AC, "distributed_type"), _distributed_type(draft)
    if item is None:
        return
    copies, shards, tensor = (_degree(draft, f"{key}_size") for key in ("dp_replicate", "dp_shard", "tp"))
    if kind == "FSDP":
        _fsdp_keys(draft, _AC, "fsdp_config.fsdp_")
        sharding = sources.written(_AC, "fsdp_config.fsdp_sharding_strategy")
        if copies > 1:
            draft.unread("parallelism_config has precedence", sharding)
            _data_parallel(draft, copies, shards, item)
        else:
            _take_sharding(draft, _sharding(draft), item, sharding)
    elif kind == "DEEPSPEED":
        _accelerates_deepspeed(draft, item)
    elif kind == "MEGATRON_LM":
        _megatron(draft, item)
    elif kind in _PLAIN_RANKS and _trainer_shards(draft):
        draft.say(item, Outcome.SAME, "it only starts the ranks; TrainingArguments determine the strategy")
    elif kind in _PLAIN_RANKS or (kind == "NO" and max(copies, shards, tensor) > 1):
        _data_parallel(draft, copies, shards, item)
    elif kind == "NO":
        draft.say(item, Outcome.SAME, "one process is ddp with one rank")
    else:
        draft.refuse(_STRATEGY, f"distributed_type {kind} has no counterpart: CUDA GPUs and CPUs only", item)


def _trainer_shards(draft: Draft) -> bool:
    """Return whether the Trainer sets up FSDP or DeepSpeed on the ranks that accelerate starts."""
    items = (draft.sources.written(_TA, key) for key in ("fsdp", "deepspeed"))
    return any(item is not None and not item.is_default for item in items)


def _sharding(draft: Draft) -> str:
    """Return the sharding of FSDP 1; FSDP 2 always shards everything."""
    for key in ("sharding_strategy", "reshard_after_forward"):
        item = draft.sources.written(_AC, f"fsdp_config.fsdp_{key}")
        if item is None:
            continue
        value = str(item.value).upper()
        if value.isdigit() and 1 <= int(value) <= len(_SHARDINGS):
            return list(_SHARDINGS)[int(value) - 1]
        if value in _SHARDINGS or (key == "sharding_strategy" and item.value is not None):
            return value  # `_take_sharding` reports an unknown one
    return "FULL_SHARD"


def _take_sharding(draft: Draft, sharding: str, *items: Item | None) -> None:
    if sharding not in _SHARDINGS:
        draft.refuse(_STRATEGY, f"the sharding {sharding} is unknown", *items)
        return
    strategy, reshards, note = _SHARDINGS[sharding]
    draft.take(_STRATEGY, strategy, *items, note=note)
    if not reshards:
        draft.take(_RESHARD, False, *items)


def _fsdp_keys(draft: Draft, tool: Tool, prefix: str) -> None:
    written = draft.sources.written
    if (item := written(tool, f"{prefix}reshard_after_forward")) is not None:
        if str(item.value).upper() in _SHARDINGS:  # in FSDP 1, part of the strategy
            draft.say(item, Outcome.CONVERTED, "part of `parallel.strategy`")
        else:
            draft.take(_RESHARD, draft.flag(item), item)
    if (item := written(tool, f"{prefix}sharding_strategy")) is not None and tool is _TA:
        draft.unread("`fsdp` has precedence", item)
    if (item := written(tool, f"{prefix}version")) is not None and item.value != 2:
        draft.say(item, Outcome.DIFFERS, "fsdp and hsdp are FSDP2: the same sharding, for each parameter")


def _degree(draft: Draft, name: str) -> int:
    item = draft.sources.written(_AC, _DEGREES + name)
    return 1 if item is None or item.value is None else draft.positive(item)


def _data_parallel(draft: Draft, copies: int, shards: int, kind: Item) -> None:
    """Propose the strategy of accelerate's degrees; without degrees, ddp."""
    sizes = (draft.sources.written(_AC, f"{_DEGREES}{name}_size") for name in ("dp_replicate", "dp_shard"))
    items = [item for item in sizes if item]
    strategy = "ddp" if shards == 1 else "fsdp" if copies == 1 else "hsdp"
    draft.take(_STRATEGY, strategy, kind, *items)
    if strategy == "hsdp":
        draft.take("parallel.shard", shards, *items)


def _accelerates_deepspeed(draft: Draft, kind: Item) -> None:
    sources, prefix = draft.sources, "deepspeed_config."
    stage = sources.written(_AC, f"{prefix}zero_stage")
    file = sources.written(_AC, f"{prefix}deepspeed_config_file")
    named = _named_file(draft, file, sources.files.get(_DS), "give that file too", kind)
    if not named and stage is None and not sources.has(_DS):
        draft.take(_STRATEGY, "zero2", kind, note="the default stage of accelerate")
    if stage is not None and stage.value is not None:
        _zero_stage(draft, stage, kind)
    elif sources.has(_DS):
        draft.say(kind, Outcome.CONVERTED, "the DeepSpeed file has the stage")


def _megatron(draft: Draft, kind: Item) -> None:
    keys = ("use_custom_fsdp", "use_distributed_optimizer", "sequence_parallelism", "num_micro_batches")
    degrees = ("pp_degree", "tp_degree")
    written = {key: draft.sources.written(_AC, f"megatron_lm_config.megatron_lm_{key}") for key in (*keys, *degrees)}
    custom, distributed, sequence, count = (written[key] for key in keys)
    stages, tensor = (draft.positive(written[key]) for key in degrees)
    switches = [item for item in (custom, distributed) if item]
    if draft.flag(custom):
        draft.take(_STRATEGY, "fsdp", kind, *switches)
    elif draft.flag(distributed) and stages > 1:
        note = "zero1 does not combine with a pipeline; fsdp shards the optimizer state too"
        draft.take(_STRATEGY, "fsdp", kind, *switches, note=note, differs=True)
    else:
        draft.take(_STRATEGY, "zero1" if draft.flag(distributed) else "ddp", kind, *switches)
    if sequence is not None and tensor > 1:
        draft.take("parallel.sequence", draft.flag(sequence), sequence)
    else:
        draft.unread("there is one tensor rank", sequence)
    if count is None or count.value is None:
        return
    if stages > 1:
        draft.take("parallel.pipeline.microbatches", draft.positive(count), count)
    else:
        draft.unread("there is one stage", count)


# DeepSpeed


def _of_deepspeed(draft: Draft) -> None:
    if not draft.sources.has(_DS):
        return
    stage = draft.sources.written(_DS, "zero_optimization.stage")
    if stage is not None:
        _zero_stage(draft, stage)
    elif not draft.sources.written(_AC, "deepspeed_config.zero_stage"):
        draft.take(_STRATEGY, "ddp", Item(_DS, "zero_optimization.stage", 0, None), note="without ZeRO")


def _zero_stage(draft: Draft, stage: Item, *others: Item) -> None:
    if stage.is_auto:
        draft.refuse(_STRATEGY, 'DeepSpeed reads the stage "auto" as 0; write the number', stage, *others)
        return
    number = draft.whole(stage)
    unknown = Todo(f"there is no ZeRO stage {number}")
    draft.take(_STRATEGY, _ZERO_STAGES.get(number, unknown), stage, *others)


def _deepspeed_keys(draft: Draft) -> None:
    """Propose the keys of `parallel.deepspeed`, under a strategy of DeepSpeed."""
    strategy = draft.value(_STRATEGY)
    for key, item in draft.sources.items.get(_DS, {}).items():
        path = item.row.key if item.row and item.row.key else ""
        if not path.startswith("parallel.deepspeed.") or item.is_auto:
            continue
        if isinstance(strategy, Todo) or (strategy in STRATEGIES and STRATEGIES[strategy].package == "deepspeed"):
            if not item.is_default:
                is_whole = isinstance(item.value, float) and item.value.is_integer()  # sizes such as 2e8
                draft.take(path, int(item.value) if is_whole else item.value, item)
        else:
            draft.say(item, Outcome.NONE, f"`{key}` needs DeepSpeed, and {strategy} does not use it")


def model_ranks(draft: Draft) -> int | None:
    """Return the number of ranks that process the same rows; None if the files conflict."""
    degrees: list[Any] = [draft.value(f"parallel.{key}", 1) for key in ("tensor", "context", "pipeline.stages")]
    return math.prod(degrees) if all(isinstance(degree, int) for degree in degrees) else None
