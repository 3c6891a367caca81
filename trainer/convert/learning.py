"""What is learned: batch, amount, optimizer, schedule, seed."""

from __future__ import annotations

import math

from trainer.convert.draft import Draft, Outcome, Todo
from trainer.convert.layout import model_ranks
from trainer.convert.sources import Item, Tool

_TA, _DS, _AC = Tool.TRAINING_ARGUMENTS, Tool.DEEPSPEED, Tool.ACCELERATE
_GLOBAL, _MICRO, _STEPS, _ACCUMULATION = (
    "training.global_batch_size",
    "training.micro_batch_size",
    "training.max_steps",
    "#accumulation",
)
_RANKS = "the number of processes: say --processes N"

_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_apex_fused", "adamw", "adam"), "adamw"),
    "sgd": "sgd",
}
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
_DEEPSPEED_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_MEAN = "the loss of a step is the mean over all its valid labels, not the mean of the means of its microbatches"
_DRAWS = "the same number draws another order, other dropout and other new weights here"
_LATE = "the warm-up is linear and begins above 0; DeepSpeed's begins at 0, and its rates come one step later"
_WARMUP = "step s of W warm-up steps has the rate (s + 1) / (W + 1) here, s / W there; from step W on both are the same"


# Batch


def batch(draft: Draft) -> None:
    """Rows of one optimizer step: those of one forward pass, times accumulation, times data-parallel ranks."""
    micro = _micro(draft)
    accumulation = _accumulation(draft)
    total = draft.sources.written(_DS, "train_batch_size")
    if total is not None and not total.is_auto:
        draft.take(_GLOBAL, draft.whole(total, 1, least=1), total)
    ranks = _ranks(draft)
    rows, times = draft.value(_MICRO), draft.value(_ACCUMULATION, 1)
    if not micro:
        if total is None or total.is_auto:
            draft.missing["training"] = '"global_batch_size", which these files do not say'
    elif isinstance(rows, Todo) or isinstance(times, Todo):
        draft.refuse(_GLOBAL, "rows of one forward pass x accumulation x ranks, of which the files disagree", *micro)
    elif ranks is not None:
        of_all = draft.flag(draft.sources.get(_TA, "accelerator_config.split_batches"))
        size = rows * times * (1 if of_all else ranks)
        arithmetic = f"{rows} rows x {times} accumulated" + ("" if of_all else f" x {ranks} data-parallel ranks")
        used = (*micro, *accumulation)
        if all(item.is_default for item in used) and total is not None and not total.is_auto:
            return  # nobody asked for what the product says
        draft.take(_GLOBAL, size, *used, note=arithmetic)
        if of_all:
            _split(draft, rows, ranks, *micro)
    elif total is None or total.is_auto:
        draft.refuse(_GLOBAL, f"{rows} rows x {times} accumulated x {_RANKS}", *micro, *accumulation)


def _micro(draft: Draft) -> list[Item]:
    items = [draft.sources.get(_TA, "per_device_train_batch_size")]
    items += [draft.sources.written(_TA, "per_gpu_train_batch_size")]
    items += [draft.sources.written(_DS, "train_micro_batch_size_per_gpu")]
    used = [item for item in items if item and not item.is_auto and item.value is not None]
    for item in used:
        draft.take(_MICRO, draft.whole(item, 1, least=1), item)
    return used


def _accumulation(draft: Draft) -> list[Item]:
    sources = draft.sources
    items = [sources.get(_TA, "gradient_accumulation_steps"), sources.written(_DS, "gradient_accumulation_steps")]
    if sources.written(_AC, "deepspeed_config.gradient_accumulation_steps"):
        items.append(sources.written(_AC, "deepspeed_config.gradient_accumulation_steps"))
    if draft.value("parallel.pipeline.microbatches") is not None:
        items.append(sources.written(_AC, "megatron_lm_config.megatron_lm_num_micro_batches"))
    used = [item for item in items if item and not item.is_auto and item.value is not None]
    for item in used:
        count = draft.whole(item, 1, least=1)
        draft.take(_ACCUMULATION, count, item, note=_MEAN if count > 1 else "", differs=count > 1)
    return used


def _ranks(draft: Draft) -> int | None:
    """The data-parallel ranks; None where the files and the command line do not say how many processes there are."""
    item = draft.sources.written(_AC, "num_processes")
    count = draft.processes
    if item is not None and draft.processes is not None and item.value != draft.processes:
        draft.say(item, Outcome.DIFFERS, f"--processes {draft.processes} counts instead")
    if count is None and item is not None and item.value is not None and draft.whole(item) > 0:
        count = draft.whole(item)
        if draft.value(_MICRO) is not None:
            draft.say(item, Outcome.LAUNCHER, f"{count} processes are counted in `training.global_batch_size`")
    size = model_ranks(draft)
    if count is None or size is None:
        return None
    if count % size:
        draft.problems.append(
            f"the number of processes must be a multiple of the {size} ranks that hold one model, but is {count};"
            " give another --processes"
        )
        return None
    return count // size


def _split(draft: Draft, rows: int, ranks: int, *items: Item) -> None:
    """A batch of all ranks: each has its part in one forward pass."""
    split = draft.sources.get(_TA, "accelerator_config.split_batches")
    used = [item for item in (split, *items) if item]
    draft.override(_MICRO, max(1, rows // ranks), *used, note="split_batches: the batch is that of all ranks")


# Amount


def amount(draft: Draft) -> None:
    """Epochs, or steps where the tools count steps."""
    sources = draft.sources
    steps, epochs = sources.get(_TA, "max_steps"), sources.get(_TA, "num_train_epochs")
    other = sources.written(_TA, "num_epochs")
    if other is not None:
        draft.unread(epochs, "num_epochs is written too") if epochs and epochs.origin else None
        epochs = other
    total = sources.written(_DS, "scheduler.params.total_num_steps")
    if total is not None and not total.is_auto:
        draft.take(_STEPS, draft.whole(total, 1, least=1), total, note="where DeepSpeed's schedule ends")
    if steps is not None and draft.whole(steps) > 0:
        draft.take(_STEPS, draft.whole(steps), steps)
        draft.unread(epochs, "max_steps decides")
    elif epochs is not None:
        draft.say(steps, Outcome.SAME, "the epochs decide")
        number = draft.number(epochs, 3.0)
        if number == int(number) and number > 0:
            draft.take("training.epochs", int(number), epochs)
        else:
            draft.refuse(
                _STEPS, f"{number:g} epochs end inside an epoch: ceil({number:g} x the steps of an epoch)", epochs
            )


# Optimizer


def optimizer(draft: Draft) -> None:
    """Name, betas and clipping; the other numbers go over as they are."""
    sources = draft.sources
    theirs = sources.written(_DS, "optimizer.type")
    item = sources.get(_TA, "optim")
    if theirs is not None:
        draft.unread(item, "DeepSpeed's `optimizer` decides")
        _named(draft, theirs, draft.text(theirs).lower())
        decay = sources.written(_DS, "optimizer.params.adam_w_mode")
        if decay is not None and not draft.flag(decay):
            draft.refuse("optimizer.name", "Adam whose decay is part of the gradient: set weight_decay to 0", decay)
    elif item is not None:
        _named(draft, item, draft.text(item))
    is_sgd = draft.value("optimizer.name") == "sgd"
    betas = [found for key in ("adam_beta1", "adam_beta2") if (found := sources.get(_TA, key))]
    epsilon = sources.get(_TA, "adam_epsilon")
    if is_sgd:
        for found in [*betas, *filter(None, [epsilon])]:
            draft.unread(found, "the optimizer is sgd")
    else:
        if betas:
            draft.take("optimizer.betas", [draft.number(found, 0.9) for found in betas], *betas)
        if epsilon is not None:
            draft.take("optimizer.epsilon", draft.number(epsilon, 1e-8), epsilon)
    rate = sources.get(_TA, "learning_rate")
    if rate is not None:
        draft.take("optimizer.learning_rate", draft.number(rate, 5e-5), rate)
    elif not sources.written(_DS, "optimizer.params.lr"):
        draft.missing["optimizer"] = '"learning_rate", which these files do not say'
    if not sources.has(_TA) and (decay := sources.written(_DS, "optimizer.params.weight_decay")) is not None:
        draft.take(
            "optimizer.weight_decay",
            draft.number(decay) if not decay.is_auto else Todo("is left to TrainingArguments: give that file too"),
            decay,
            note="not applied to biases and norm weights here; there, as the program groups its parameters",
            differs=bool(decay.value),
        )
    _clipping(draft)


def _named(draft: Draft, item: Item, name: str) -> None:
    if name in _OPTIMIZERS:
        draft.take("optimizer.name", _OPTIMIZERS[name], item)
    else:
        draft.refuse("optimizer.name", f"{name} has no counterpart: adamw or sgd", item)


def _clipping(draft: Draft) -> None:
    for item in (
        draft.sources.get(_TA, "max_grad_norm"),
        draft.sources.written(_DS, "gradient_clipping"),
        draft.sources.written(_AC, "deepspeed_config.gradient_clipping"),
        draft.sources.written(_AC, "megatron_lm_config.megatron_lm_gradient_clipping"),
    ):
        if item is None or item.is_auto:
            continue
        norm = 0 if item.value is None else draft.number(item, 1.0)
        draft.take("training.max_grad_norm", norm if norm > 0 else None, item)


# Schedule


def schedule(draft: Draft) -> None:
    """Name and warm-up."""
    theirs = draft.sources.written(_DS, "scheduler.type")
    if theirs is not None:
        _deepspeeds_schedule(draft, theirs)
        return
    for key in ("warmup_num_steps", "warmup_max_lr"):
        draft.unread(draft.sources.written(_DS, f"scheduler.params.{key}"), "there is no scheduler.type")
    item = draft.sources.get(_TA, "lr_scheduler_type")
    if item is None:
        return
    name = draft.text(item)
    if name in _SCHEDULES:
        draft.take("schedule.name", _SCHEDULES[name], item)
    else:
        draft.refuse("schedule.name", f"{name} has no counterpart: linear, cosine or constant", item)
    ratio, steps = draft.sources.written(_TA, "warmup_ratio"), draft.sources.get(_TA, "warmup_steps")
    if name == "constant":
        for found in (ratio, steps):
            draft.unread(found, "the schedule constant does not warm up")
    elif steps is not None and draft.number(steps) > 0:
        draft.unread(ratio, "warmup_steps decides")
        _warmup(draft, draft.number(steps), steps)
    elif ratio is not None and not ratio.is_default:
        _warmup(draft, draft.number(ratio), ratio)
        draft.unread(steps, "warmup_ratio decides")
    else:
        draft.unread(steps, "it asks for no warm-up")


def _warmup(draft: Draft, amount: float, item: Item, shape: str = _WARMUP) -> None:
    total = draft.value(_STEPS)
    value: float = amount
    if amount >= 1:
        value, note = int(amount), shape
    elif isinstance(total, int):
        value, note = math.ceil(total * amount), f"{amount:g} of {total} steps, rounded up; {shape}"
    else:
        note = f"the share of the steps is rounded to the nearest step here, up there; {shape}"
    draft.take("schedule.warmup", value, item, note=note, differs=True)


def _deepspeeds_schedule(draft: Draft, kind: Item) -> None:
    sources = draft.sources
    for key in ("lr_scheduler_type", "lr_scheduler_kwargs"):
        draft.unread(sources.written(_TA, key), "DeepSpeed's `scheduler` decides")
    name = draft.text(kind)
    if name in _DEEPSPEED_SCHEDULES:
        draft.take("schedule.name", _DEEPSPEED_SCHEDULES[name], kind)
    else:
        draft.refuse("schedule.name", f"{name} has no counterpart: linear, cosine or constant", kind)
    steps = sources.written(_DS, "scheduler.params.warmup_num_steps")
    arguments = [sources.written(_TA, "warmup_ratio"), sources.get(_TA, "warmup_steps")]
    if steps is not None and steps.is_auto:
        asked = [item for item in arguments if item and draft.number(item) > 0]
        if asked:
            _warmup(draft, draft.number(asked[-1]), asked[-1], _LATE)
    else:
        for item in arguments:
            draft.unread(item, "DeepSpeed's `scheduler` decides")
        count = draft.whole(steps, 1000) if steps else 1000
        item = steps or Item(_DS, "scheduler.params.warmup_num_steps", count, None)
        draft.take("schedule.warmup", count, item, note=_LATE, differs=True)
    warmup_type = sources.written(_DS, "scheduler.params.warmup_type")
    if warmup_type is None:
        draft.say(kind, Outcome.DIFFERS, f"`schedule.name`; {_log_warmup(draft)}")
    rate = sources.written(_DS, "scheduler.params.warmup_max_lr")
    if rate is not None and not rate.is_auto:
        draft.take("optimizer.learning_rate", draft.number(rate, 5e-5), rate)


def _log_warmup(draft: Draft) -> str:
    return (
        f"{draft.value('schedule.name')}, whose warm-up is linear; DeepSpeed's is logarithmic unless `warmup_type` says"
    )


# Seed


def seed(draft: Draft) -> None:
    """One seed for everything."""
    both = [draft.sources.get(_TA, "seed"), draft.sources.written(_TA, "data_seed")]
    first, data = both
    if first is not None:
        draft.take("training.seed", draft.whole(first, 42), first, note=_DRAWS, differs=not first.is_default)
    if data is None or data.value is None:
        return
    if first is not None and data.value == first.value:
        draft.say(data, Outcome.SAME, "one seed for everything")
    else:
        draft.say(data, Outcome.NONE, "the order of rows follows from `training.seed` too")
