"""Conversion of batch, steps, optimizer, schedule and seed."""

from __future__ import annotations

import math

from trainer.recipe.registered import optimizer_sections, schedule_sections
from trainer.recipe.schema import AdamW, OptimizerKeys, ScheduleKeys
from trainer.tools.convert.draft import Draft, Outcome
from trainer.tools.convert.foreign.values import Todo
from trainer.tools.convert.layout import model_ranks
from trainer.tools.convert.sources import Item, Tool

_TA, _DS, _AC = Tool.TRAINING_ARGUMENTS, Tool.DEEPSPEED, Tool.ACCELERATE
_GLOBAL, _MICRO, _STEPS, _ACCUMULATION = (
    "training.global_batch_size",
    "training.micro_batch_size",
    "training.max_steps",
    "#accumulation",
)
_RANKS = "the number of processes; give --processes N"

_DEEPSPEED_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_MEAN = "the loss of a step is the mean over all its valid labels, not the mean over the means of microbatches"
_DRAWS = "the same seed gives another sample order, dropout and initialisation"
_LATE = "the warmup is linear and starts above 0; that of DeepSpeed starts at 0, one step later"
_WARMUP = "step s of W warmup steps has the factor (s + 1) / (W + 1) instead of s / W; later steps are the same"


# Batch


def batch(draft: Draft) -> None:
    """Propose the global batch size: micro batch size x accumulation x data-parallel ranks."""
    sources = draft.sources
    micro = _given(
        sources.get(_TA, "per_device_train_batch_size"),
        sources.written(_TA, "per_gpu_train_batch_size"),
        sources.written(_DS, "train_micro_batch_size_per_gpu"),
    )
    for item in micro:
        draft.take(_MICRO, draft.positive(item), item)
    accumulation = _accumulation(draft)
    totals = _given(sources.written(_DS, "train_batch_size"), keeps_null=True)
    for item in totals:
        draft.take(_GLOBAL, draft.positive(item), item)
    ranks = _ranks(draft)
    rows, times = draft.value(_MICRO), draft.value(_ACCUMULATION, 1)
    split = sources.get(_TA, "accelerator_config.split_batches")
    of_all = draft.flag(split)
    factor, of_ranks = (1, "") if of_all else (ranks, f" x {ranks} data-parallel ranks")
    if not micro:
        if not totals:
            draft.missing["training"] = '"global_batch_size", which these files do not have'
    elif isinstance(rows, Todo) or isinstance(times, Todo):
        draft.refuse(_GLOBAL, "micro batch size x accumulation x ranks; the files conflict", *micro)
    elif factor is not None:
        if totals and all(item.is_default for item in (*micro, *accumulation)):
            return  # DeepSpeed's file has the total
        arithmetic = f"{rows} rows x {times} accumulated{of_ranks}"
        draft.take(_GLOBAL, rows * times * factor, *micro, *accumulation, note=arithmetic)
        if of_all:
            share: int | Todo = Todo(f"{rows} rows divided by {_RANKS}") if ranks is None else max(1, rows // ranks)
            draft.override(_MICRO, share, *_given(split), *micro, note="split_batches: the batch of all ranks")
    elif not totals:
        draft.refuse(_GLOBAL, f"{rows} rows x {times} accumulated x {_RANKS}", *micro, *accumulation)


def _given(*items: Item | None, keeps_null: bool = False) -> list[Item]:
    return [item for item in items if item and not item.is_auto and (keeps_null or item.value is not None)]


def _accumulation(draft: Draft) -> list[Item]:
    sources = draft.sources
    items = [sources.get(_TA, "gradient_accumulation_steps"), sources.written(_DS, "gradient_accumulation_steps")]
    items.append(sources.written(_AC, "deepspeed_config.gradient_accumulation_steps"))
    if draft.value("parallel.pipeline.microbatches") is not None:
        items.append(sources.written(_AC, "megatron_lm_config.megatron_lm_num_micro_batches"))
    used = _given(*items)
    for item in used:
        count = draft.positive(item)
        draft.take(_ACCUMULATION, count, item, note=_MEAN if count > 1 else "", differs=count > 1)
    return used


def _ranks(draft: Draft) -> int | None:
    item = draft.sources.written(_AC, "num_processes")
    count = draft.processes or draft.sources.processes
    if item is not None and count is not None and item.value != count:
        draft.say(item, Outcome.DIFFERS, f"--processes {count} has precedence")
    if count is None and item is not None and item.value is not None and draft.whole(item) > 0:
        count = draft.whole(item)
        if draft.value(_MICRO) is not None:
            draft.say(item, Outcome.LAUNCHER, f"{count} processes are part of `training.global_batch_size`")
    size = model_ranks(draft)
    if count is None or size is None:
        return None
    if count % size:
        draft.problems.append(
            f"the number of processes must be a multiple of the {size} ranks of one model, but is {count};"
            " change --processes"
        )
        return None
    return count // size


# Amount


def amount(draft: Draft) -> None:
    sources = draft.sources
    steps, epochs = sources.get(_TA, "max_steps"), sources.get(_TA, "num_train_epochs")
    other = sources.written(_TA, "num_epochs")
    if other is not None:
        draft.unread("num_epochs has precedence", epochs)
        epochs = other
    for total in _given(sources.written(_DS, "scheduler.params.total_num_steps"), keeps_null=True):
        draft.take(_STEPS, draft.positive(total), total, note="the end of DeepSpeed's schedule")
    if steps is not None and draft.whole(steps) > 0:
        draft.take(_STEPS, draft.whole(steps), steps)
        draft.unread("max_steps has precedence", epochs)
    elif epochs is not None:
        draft.say(steps, Outcome.SAME, "the number of epochs applies")
        number = draft.number(epochs, 3.0)
        if number > 0:
            draft.take("training.epochs", int(number) if number == int(number) else number, epochs)
        else:
            draft.refuse(_STEPS, f"{number:g} epochs train nothing; write the number of steps", epochs)


# Optimizer


def unread_arguments(draft: Draft) -> None:
    """Report the arguments that keys of a DeepSpeed file replace."""
    if draft.sources.written(_DS, "optimizer.type") is not None:
        draft.unread("DeepSpeed's `optimizer` has precedence", draft.sources.written(_TA, "optim"))


def _section(draft: Draft) -> type[OptimizerKeys]:
    """Return the section of the optimizer; without a counterpart, that of a recipe without the key."""
    return optimizer_sections().get(draft.value("optimizer.name"), AdamW)


def optimizer(draft: Draft) -> None:
    sources = draft.sources
    decay = sources.written(_DS, "optimizer.params.adam_w_mode")
    if sources.written(_DS, "optimizer.type") is not None and decay is not None and not draft.flag(decay):
        why = "Adam with weight decay in the gradient has no counterpart; set weight_decay to 0"
        draft.refuse("optimizer.name", why, decay)
    name = draft.value("optimizer.name")
    betas = [found for key in ("adam_beta1", "adam_beta2") if (found := sources.get(_TA, key))]
    epsilon = sources.get(_TA, "adam_epsilon")
    if "betas" not in _section(draft).model_fields:
        draft.unread(f"the optimizer is {name}", *betas, epsilon)
    else:
        if betas:
            draft.take("optimizer.betas", [draft.number(found, 0.9) for found in betas], *betas)
        if epsilon is not None:
            draft.take("optimizer.epsilon", draft.number(epsilon, 1e-8), epsilon)
    if sources.has(_TA):
        return
    if not sources.written(_DS, "optimizer.params.lr"):
        draft.missing["optimizer"] = '"learning_rate", which these files do not have'
    if (decay := sources.written(_DS, "optimizer.params.weight_decay")) is not None:
        draft.take(
            "optimizer.weight_decay",
            draft.number(decay) if not decay.is_auto else Todo("TrainingArguments determine it; give that file too"),
            decay,
            note="excludes biases and norm weights; in DeepSpeed, the program groups the parameters",
            differs=bool(decay.value),
        )


# Schedule


def schedule(draft: Draft) -> None:
    theirs = draft.sources.written(_DS, "scheduler.type")
    if theirs is not None:
        _deepspeeds_schedule(draft, theirs)
        return
    for key in ("warmup_num_steps", "warmup_max_lr", "cos_min_ratio"):
        draft.unread("scheduler.type is missing", draft.sources.written(_DS, f"scheduler.params.{key}"))
    item = draft.sources.get(_TA, "lr_scheduler_type")
    if item is None:
        return
    name = draft.text(item)
    if _section(draft).replaces_decay:
        decays = not name.startswith("constant")
        note = f"the average of the weights replaces the schedule; transformers multiplies the rate by {name} too"
        draft.take("schedule.name", "constant", item, note=note if decays else "", differs=decays)
        draft.unread("the optimizer has no decay", draft.sources.get(_TA, "lr_scheduler_kwargs"))
        name = "constant_with_warmup"  # the optimizer itself warms up
    else:
        ours = {theirs: own for own, keys in schedule_sections().items() for theirs in keys.foreign_names}
        _named(draft, item, name, ours)
        if name in ours:
            _arguments(draft, name, item, schedule_sections()[ours[name]])
    ratio, steps = draft.sources.written(_TA, "warmup_ratio"), draft.sources.get(_TA, "warmup_steps")
    if name == "constant":
        draft.unread("the schedule constant has no warmup", ratio, steps)
    elif steps is not None and draft.number(steps) > 0:
        draft.unread("warmup_steps has precedence", ratio)
        _warmup(draft, steps, _WARMUP)
    elif ratio is not None and not ratio.is_default:
        _warmup(draft, ratio, _WARMUP)
        draft.unread("warmup_ratio has precedence", steps)
    else:
        draft.unread("it sets no warmup", steps)


def _named(draft: Draft, item: Item, name: str, schedules: dict[str, str]) -> None:
    unknown = Todo(f"{name} has no counterpart: {', '.join(schedule_sections())}")
    draft.take("schedule.name", schedules.get(name, unknown), item)


def _arguments(draft: Draft, name: str, kind: Item, keys: type[ScheduleKeys]) -> None:
    item = draft.sources.get(_TA, "lr_scheduler_kwargs")
    given = dict(item.value) if item is not None and isinstance(item.value, dict) else {}
    if item is not None and not given and not item.is_default:
        draft.refuse_file(item, "it must be an object of arguments")
    source = kind if item is None or item.is_default else item
    least, default = keys.foreign_least_rates.get(name, ("", None))
    rate, peak = given.pop(least, default), draft.value("optimizer.learning_rate")
    if rate is not None and isinstance(peak, (int, float)):
        draft.take("schedule.min_rate", rate / peak, source, note=f"{least} {rate:g}, as a share of the peak {peak:g}")
    for argument, value in given.items():
        key = keys.foreign_names[name].get(argument)
        if key is None and item is not None:
            draft.refuse_file(item, f"{name} has no argument {argument} here")
        else:
            draft.take(f"schedule.{key}", value, source)


def _warmup(draft: Draft, item: Item, shape: str) -> None:
    total, amount = draft.value(_STEPS), draft.number(item)
    value: float = amount
    if amount >= 1:
        value, note = int(amount), shape
    elif isinstance(total, int):
        value, note = math.ceil(total * amount), f"{amount:g} of {total} steps, rounded up; {shape}"
    else:
        way = "down" if item.program is Tool.AXOLOTL else "up"
        note = f"the fraction of the steps is rounded to the nearest step, not {way}; {shape}"
    draft.take("schedule.warmup", value, item, note=note, differs=True)


def _deepspeeds_schedule(draft: Draft, kind: Item) -> None:
    sources, precedence = draft.sources, "DeepSpeed's `scheduler` has precedence"
    draft.unread(precedence, *(sources.written(_TA, f"lr_scheduler_{key}") for key in ("type", "kwargs")))
    _named(draft, kind, draft.text(kind), _DEEPSPEED_SCHEDULES)
    least = sources.get(_DS, "scheduler.params.cos_min_ratio")
    if least is not None and draft.value("schedule.name") == "cosine":
        draft.take("schedule.min_rate", draft.number(least), least if least.origin else kind)
    else:
        draft.unread("only WarmupCosineLR has it", least)
    steps = sources.written(_DS, "scheduler.params.warmup_num_steps")
    arguments = [sources.written(_TA, "warmup_ratio"), sources.get(_TA, "warmup_steps")]
    if steps is not None and steps.is_auto:
        asked = [item for item in arguments if item and draft.number(item) > 0]
        if asked:
            _warmup(draft, asked[-1], _LATE)
    else:
        draft.unread(precedence, *arguments)
        count = draft.whole(steps, 1000)
        item = steps or Item(_DS, "scheduler.params.warmup_num_steps", count, None)
        draft.take("schedule.warmup", count, item, note=_LATE, differs=True)
    if sources.written(_DS, "scheduler.params.warmup_type") is None:
        text = "the warmup is linear; DeepSpeed's is logarithmic by default (`warmup_type`)"
        draft.say(kind, Outcome.DIFFERS, f"`schedule.name` {draft.value('schedule.name')}; {text}")
    for rate in _given(sources.written(_DS, "scheduler.params.warmup_max_lr"), keeps_null=True):
        draft.take("optimizer.learning_rate", draft.number(rate, 5e-5), rate)


# Seed


def seed(draft: Draft) -> None:
    first, data = draft.sources.get(_TA, "seed"), draft.sources.written(_TA, "data_seed")
    if first is not None:
        draft.take("training.seed", draft.whole(first, 42), first, note=_DRAWS, differs=not first.is_default)
    if data is None or data.value is None:
        return
    if first is not None and data.value == first.value:
        draft.say(data, Outcome.SAME, "one seed for all random numbers")
    else:
        draft.say(data, Outcome.NONE, "`training.seed` is also the seed of the sample order")
