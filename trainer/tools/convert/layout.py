"""Conversion of the layout and the precision: strategy, degrees, offload, activation checkpointing."""

from __future__ import annotations

from typing import Any

from trainer.recipe.strategies import STRATEGIES
from trainer.tools.convert.draft import Draft, Outcome, Todo
from trainer.tools.convert.sources import Item, Tool

_TA, _DS, _AC = Tool.TRAINING_ARGUMENTS, Tool.DEEPSPEED, Tool.ACCELERATE
_STRATEGY, _OFFLOAD, _RECOMPUTE = "parallel.strategy", "parallel.offload", "activation_checkpointing"
_SHARDINGS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")  # torch counts from 1
_ZERO_STAGES = {row.zero_stage: row.name for row in STRATEGIES.values() if row.zero_stage} | {0: "ddp"}
_PLAIN_RANKS = ("MULTI_GPU", "MULTI_CPU")


def layout(draft: Draft) -> None:
    _of_arguments(draft)
    _of_accelerate(draft)
    _of_deepspeed(draft)
    _degrees(draft)


def precision(draft: Draft) -> None:
    sources = draft.sources
    flags = [item for key in ("bf16", "fp16") if (item := sources.get(_TA, key))]
    _word(draft, flags, "")
    sections = ("bf16", "bfloat16", "fp16")
    switches = [item for key in sections if (item := sources.written(_DS, f"{key}.enabled")) and not item.is_auto]
    _word(draft, switches, "weights and gradients stay in fp32; those of DeepSpeed have that type")
    _autocast(draft)
    item = sources.get(_AC, "mixed_precision")
    old = sources.written(_AC, "fp16")
    if old is not None and (item is None or item.origin is None):
        _word(draft, [old], "")
    elif item is not None:
        draft.unread("mixed_precision has precedence", old)
        value = "no" if item.value in (None, False) else item.value  # YAML reads an unquoted no as false
        if value in ("no", "bf16", "fp16"):
            draft.take("precision", "fp32" if value == "no" else value, item)
        else:
            draft.refuse("precision", f"{value} has no counterpart: fp32, bf16 or fp16", item)


def _word(draft: Draft, switches: list[Item], note: str) -> None:
    on = [item for item in switches if draft.flag(item)]
    if len(on) > 1:
        draft.refuse("precision", f"{' and '.join(item.key for item in on)} are both on", *on)
    elif switches:
        word = "fp32" if not on else "fp16" if "fp16" in on[0].key else "bf16"
        draft.take("precision", word, *switches, note=note if on else "", differs=bool(on and note))


def _autocast(draft: Draft) -> None:
    switch, dtype = (draft.sources.written(_DS, f"torch_autocast.{key}") for key in ("enabled", "dtype"))
    if switch is None or not draft.flag(switch):
        draft.unread("torch_autocast is off", dtype)
        return
    used = [item for item in (switch, dtype) if item]
    word = {"bfloat16": "bf16", "float16": "fp16"}.get(str(dtype.value).removeprefix("torch.") if dtype else "")
    word = word or (str(dtype.value) if dtype and dtype.value in ("bf16", "fp16") else None)
    if word is None:
        draft.refuse("precision", "torch_autocast needs the type bf16 or fp16", *used)
    else:
        draft.take("precision", word, *used)


# TrainingArguments


def _of_arguments(draft: Draft) -> None:
    sources = draft.sources
    for key in ("activation_checkpointing", "gradient_checkpointing"):
        item = sources.get(_TA, key)
        draft.switch(_RECOMPUTE, item, "full")
    deepspeed = sources.written(_TA, "deepspeed")
    if deepspeed is not None and deepspeed.value is not None:
        if sources.has(_DS):
            draft.say(deepspeed, Outcome.SAME, f"is converted too: {sources.files[_DS]}")
        else:
            draft.refuse(_STRATEGY, f"{deepspeed.value} does not exist; give that file too", deepspeed)
    item = sources.get(_TA, "fsdp")
    if item is None:
        return
    path = sources.written(_TA, "fsdp_config")
    if path is not None and isinstance(path.value, str):
        if any(key.startswith("fsdp_config.") for key in sources.items[_TA]):
            draft.say(path, Outcome.SAME, "is converted too")
        else:
            draft.refuse(_STRATEGY, f"{path.value} does not exist; write its keys into this file", path)
    if item.is_default:
        draft.unread("fsdp is not set", *_inside(draft, _TA, "fsdp_config"))
        return
    words = set(str(item.value).replace(",", " ").split()) if not isinstance(item.value, list) else set(item.value)
    known = {"full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2", "no_shard", "auto_wrap", "offload"}
    strange = words - known - {"True", "true"}
    if strange:
        draft.refuse(_STRATEGY, f"fsdp {' '.join(sorted(strange))} is unknown", item)
        return
    sharding = next((word.upper() for word in sorted(words & known - {"auto_wrap", "offload"})), "FULL_SHARD")
    _sharded(draft, sharding, item)
    if "offload" in words:
        draft.take(_OFFLOAD, "parameters", item)
    draft.switch(_OFFLOAD, sources.written(_TA, "fsdp_config.cpu_offload"), "parameters")
    _fsdp_keys(draft, _TA, "fsdp_config.")


# accelerate


def _of_accelerate(draft: Draft) -> None:
    sources = draft.sources
    item = sources.get(_AC, "distributed_type")
    if item is None:
        return
    kind = "NO" if item.value is False else str(item.value)  # YAML reads an unquoted NO as false
    sections = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config", "MEGATRON_LM": "megatron_lm_config"}
    for other, section in sections.items():
        if other != kind:
            draft.unread(f"distributed_type is {kind}", *_inside(draft, _AC, section))
    degrees = {key: _degree(draft, key) for key in ("dp_replicate_size", "dp_shard_size", "tp_size")}
    if kind == "FSDP":
        _fsdp_keys(draft, _AC, "fsdp_config.fsdp_")
        sharding = sources.written(_AC, "fsdp_config.fsdp_sharding_strategy")
        if (degrees["dp_replicate_size"] or 1) > 1:
            draft.unread("parallelism_config has precedence", sharding)
            _parallelism(draft, item)
        else:
            _sharded(draft, _sharding(draft), item, *([sharding] if sharding else []))
    elif kind == "DEEPSPEED":
        _accelerates_deepspeed(draft, item)
    elif kind == "MEGATRON_LM":
        _megatron(draft, item)
    elif kind in _PLAIN_RANKS and _arguments_decide(draft):
        draft.say(item, Outcome.SAME, "it only starts the ranks; TrainingArguments determine the strategy")
    elif kind in _PLAIN_RANKS:
        _parallelism(draft, item)
    elif kind == "NO":
        if any((degree or 1) > 1 for degree in degrees.values()):
            _parallelism(draft, item)
        else:
            draft.say(item, Outcome.SAME, "one process is ddp with one rank")
    else:
        draft.refuse(_STRATEGY, f"distributed_type {kind} has no counterpart: CUDA GPUs and CPUs only", item)


def _arguments_decide(draft: Draft) -> bool:
    """Return whether the Trainer sets up FSDP or DeepSpeed on the ranks that accelerate starts."""
    written = (draft.sources.written(_TA, key) for key in ("fsdp", "deepspeed"))
    return any(item is not None and not item.is_default for item in written)


def _inside(draft: Draft, tool: Tool, section: str) -> list[Item]:
    return [item for key, item in draft.sources.items.get(tool, {}).items() if key.split(".")[0] == section]


def _sharding(draft: Draft) -> str:
    """Return the sharding of FSDP 1; FSDP 2 always shards everything."""
    for key in ("sharding_strategy", "reshard_after_forward"):
        item = draft.sources.written(_AC, f"fsdp_config.fsdp_{key}")
        if item is None:
            continue
        value = str(item.value).upper()
        if value.isdigit() and 1 <= int(value) <= len(_SHARDINGS):
            return _SHARDINGS[int(value) - 1]
        if value in _SHARDINGS:
            return value
        if key == "sharding_strategy" and item.value is not None:
            return value  # `_sharded` reports it
    return "FULL_SHARD"


def _sharded(draft: Draft, sharding: str, *items: Item) -> None:
    reshard = "parallel.reshard_after_forward"
    if sharding == "NO_SHARD":
        draft.take(_STRATEGY, "ddp", *items, note="the same as NO_SHARD")
    elif sharding in ("FULL_SHARD", "SHARD_GRAD_OP"):
        draft.take(_STRATEGY, "fsdp", *items)
        if sharding == "SHARD_GRAD_OP":
            draft.take(reshard, False, *items)
    elif sharding in ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2"):
        draft.take(_STRATEGY, "hsdp", *items, note="shards over the ranks of a node: `parallel.shard` auto")
        if sharding == "HYBRID_SHARD_ZERO2":
            draft.take(reshard, False, *items)
    else:
        draft.refuse(_STRATEGY, f"the sharding {sharding} is unknown", *items)


def _fsdp_keys(draft: Draft, tool: Tool, prefix: str) -> None:
    written = draft.sources.written
    draft.switch(_OFFLOAD, written(tool, f"{prefix}offload_params"), "parameters")
    draft.switch(_RECOMPUTE, written(tool, f"{prefix}activation_checkpointing"), "full")
    if (item := written(tool, f"{prefix}reshard_after_forward")) is not None:
        if str(item.value).upper() in _SHARDINGS:  # in FSDP 1, part of the strategy
            draft.say(item, Outcome.CONVERTED, "part of `parallel.strategy`")
        else:
            draft.take("parallel.reshard_after_forward", draft.flag(item), item)
    if (item := written(tool, f"{prefix}sharding_strategy")) is not None and tool is _TA:
        draft.unread("`fsdp` has precedence", item)
    if (item := written(tool, f"{prefix}version")) is not None and item.value != 2:
        draft.say(item, Outcome.DIFFERS, "fsdp and hsdp are FSDP2: the same sharding, for each parameter")


def _degree(draft: Draft, name: str) -> int | None:
    item = draft.sources.written(_AC, f"parallelism_config.parallelism_config_{name}")
    return None if item is None or item.value is None else draft.whole(item, 1, least=1)


def _parallelism(draft: Draft, kind: Item) -> None:
    """Propose the strategy of accelerate's degrees; without degrees, ddp."""
    items = [
        item
        for name in ("dp_replicate_size", "dp_shard_size")
        if (item := draft.sources.written(_AC, f"parallelism_config.parallelism_config_{name}"))
    ]
    copies, shards = _degree(draft, "dp_replicate_size") or 1, _degree(draft, "dp_shard_size") or 1
    if shards > 1 and copies > 1:
        draft.take(_STRATEGY, "hsdp", kind, *items)
        draft.take("parallel.shard", shards, *items)
    else:
        draft.take(_STRATEGY, "fsdp" if shards > 1 else "ddp", kind, *items)


def _accelerates_deepspeed(draft: Draft, kind: Item) -> None:
    sources, prefix = draft.sources, "deepspeed_config."
    file = sources.written(_AC, f"{prefix}deepspeed_config_file")
    stage = sources.written(_AC, f"{prefix}zero_stage")
    if file is not None and file.value is not None:
        if sources.has(_DS):
            draft.say(file, Outcome.SAME, f"is converted too: {sources.files[_DS]}")
            draft.say(kind, Outcome.CONVERTED, "the DeepSpeed file has the stage")
        else:
            draft.refuse(_STRATEGY, f"{file.value} does not exist; give that file too", kind, file)
    elif stage is None and not sources.has(_DS):
        draft.take(_STRATEGY, "zero2", kind, note="the default stage of accelerate")
    if stage is not None and stage.value is not None:
        _staged(draft, stage, kind)
    elif sources.has(_DS):
        draft.say(kind, Outcome.CONVERTED, "the DeepSpeed file has the stage")
    _offload(draft, sources.written(_AC, f"{prefix}offload_optimizer_device"), "optimizer")
    _offload(draft, sources.written(_AC, f"{prefix}offload_param_device"), "parameters")


def _megatron(draft: Draft, kind: Item) -> None:
    sources, prefix = draft.sources, "megatron_lm_config.megatron_lm_"
    get = {
        name: sources.written(_AC, prefix + name)
        for name in (
            "pp_degree",
            "tp_degree",
            "num_micro_batches",
            "sequence_parallelism",
            "recompute_activations",
            "recompute_granularity",
            "use_distributed_optimizer",
            "use_custom_fsdp",
            "optimizer_cpu_offload",
        )
    }
    stages = draft.whole(get["pp_degree"], 1, least=1) if get["pp_degree"] else 1
    tensor = draft.whole(get["tp_degree"], 1, least=1) if get["tp_degree"] else 1
    if get["pp_degree"]:
        draft.take("parallel.pipeline.stages", stages, get["pp_degree"])
    if get["tp_degree"]:
        draft.take("parallel.tensor", tensor, get["tp_degree"])
    custom, distributed = get["use_custom_fsdp"], get["use_distributed_optimizer"]
    switches = [item for item in (custom, distributed) if item]
    if draft.flag(custom):
        draft.take(_STRATEGY, "fsdp", kind, *switches)
    elif draft.flag(distributed) and stages > 1:
        note = "zero1 does not combine with a pipeline; fsdp shards the optimizer state too"
        draft.take(_STRATEGY, "fsdp", kind, *switches, note=note, differs=True)
    else:
        draft.take(_STRATEGY, "zero1" if draft.flag(distributed) else "ddp", kind, *switches)
    item = get["sequence_parallelism"]
    if item is not None and tensor > 1:
        draft.take("parallel.sequence", draft.flag(item), item)
    else:
        draft.unread("there is one tensor rank", item)
    count = get["num_micro_batches"]
    if count is not None and count.value is not None:
        if stages > 1:
            draft.take("parallel.pipeline.microbatches", draft.whole(count, 1, least=1), count)
        else:
            draft.unread("there is one stage", count)
    activations, granularity = get["recompute_activations"], get["recompute_granularity"]
    if granularity is not None and granularity.value is not None:
        draft.take(_RECOMPUTE, draft.text(granularity, "full"), granularity)
    draft.switch(_RECOMPUTE, activations, "selective")
    draft.switch(_OFFLOAD, get["optimizer_cpu_offload"], "optimizer")


# DeepSpeed


def _of_deepspeed(draft: Draft) -> None:
    sources, zero = draft.sources, "zero_optimization."
    if not sources.has(_DS):
        return
    stage = sources.written(_DS, f"{zero}stage")
    if stage is not None:
        _staged(draft, stage)
    elif not sources.written(_AC, "deepspeed_config.zero_stage"):
        draft.take(_STRATEGY, "ddp", Item(_DS, f"{zero}stage", 0, None), note="without ZeRO")
    _offload(draft, sources.written(_DS, f"{zero}offload_optimizer.device"), "optimizer")
    _offload(draft, sources.written(_DS, f"{zero}offload_param.device"), "parameters")
    old = {"cpu_offload": "optimizer", "cpu_offload_param": "parameters", "cpu_offload_params": "parameters"}
    for key, offloaded in old.items():
        item = sources.written(_DS, zero + key)
        if item is not None and item.value is not None:
            draft.switch(_OFFLOAD, item, offloaded)
    _passed_on(draft)


def _staged(draft: Draft, stage: Item, *others: Item) -> None:
    if stage.is_auto:
        draft.refuse(_STRATEGY, 'DeepSpeed reads the stage "auto" as 0; write the number', stage, *others)
        return
    number = draft.whole(stage)
    if number in _ZERO_STAGES:
        draft.take(_STRATEGY, _ZERO_STAGES[number], stage, *others)
    else:
        draft.refuse(_STRATEGY, f"there is no ZeRO stage {number}", stage, *others)


def _offload(draft: Draft, item: Item | None, offloaded: str) -> None:
    if item is None:
        return
    device = "none" if item.value is None else draft.text(item, "none")
    if device == "cpu":
        draft.take(_OFFLOAD, offloaded, item)
    elif device == "nvme":
        draft.refuse(_OFFLOAD, f"{item.key} nvme has no counterpart: offload uses CPU memory", item)
    elif device != "none":
        draft.refuse(_OFFLOAD, f"{item.key} {device} is unknown", item)
    else:
        draft.say(item, Outcome.SAME, "nothing is offloaded")


def _passed_on(draft: Draft) -> None:
    """Propose the keys of `parallel.deepspeed`, under a strategy of DeepSpeed."""
    strategy = draft.value(_STRATEGY)
    for key, item in draft.sources.items[_DS].items():
        path = item.row.key if item.row and item.row.key else ""
        if not path.startswith("parallel.deepspeed.") or item.is_auto:
            continue
        if isinstance(strategy, Todo) or (strategy in STRATEGIES and STRATEGIES[strategy].zero_stage):
            if not item.is_default:
                is_whole = isinstance(item.value, float) and item.value.is_integer()  # sizes such as 2e8
                draft.take(path, int(item.value) if is_whole else item.value, item)
        else:
            draft.say(item, Outcome.NONE, f"`{key}` needs DeepSpeed, and {strategy} does not use it")


def _degrees(draft: Draft) -> None:
    prefix = "parallelism_config.parallelism_config_"
    for key, name in (("tensor", "tp_size"), ("context", "cp_size"), ("context", "sp_size")):
        degree = draft.sources.written(_AC, prefix + name)
        if degree is not None and degree.value is not None:
            draft.take(f"parallel.{key}", draft.whole(degree, 1, least=1), degree)
    if item := draft.sources.written(_DS, "sequence_parallel_size"):
        draft.take("parallel.context", draft.whole(item, 1, least=1), item)
    draft.combine(_OFFLOAD, {"optimizer", "parameters"}, "parameters")  # includes the optimizer


def model_ranks(draft: Draft) -> int | None:
    """Return the number of ranks that process the same rows; None if the files conflict."""
    product = 1
    for key in ("parallel.tensor", "parallel.context", "parallel.pipeline.stages"):
        degree: Any = draft.value(key, 1)
        if not isinstance(degree, int):
            return None
        product *= degree
    return product
