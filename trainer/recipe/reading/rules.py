"""Rules over several sections of a recipe that need neither the number of ranks nor the data.

Rules check valid sections with absolute paths. A rule over the keys of one section is beside it, in `recipe/schema/`.
Two conditions that exclude each other are a row of `recipe/combinations.py`. To add another rule, write a generator and
its row in `_RULES`. A feature registers a rule by its keys, and the rule gets their sections.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trainer.base.extensions import registered, resolved
from trainer.base.text import has_secret, leaves
from trainer.recipe.combinations import EXCLUSIONS
from trainer.recipe.paths import dotted, shown_value
from trainer.recipe.registered import extended
from trainer.recipe.schema import (
    Data,
    Evaluation,
    FileData,
    Model,
    Parallel,
    ScheduleKeys,
    Section,
    TaskSection,
    Training,
)
from trainer.recipe.schema.section import Contradiction, clash
from trainer.recipe.strategies import NO_DP


def contradictions(sections: Mapping[str, Any]) -> Iterator[Contradiction]:
    """Yield the contradictions in these sections; rules on other sections are skipped."""
    # An invalid recipe lacks the sections that are invalid, so rules on them are left out.
    for row in EXCLUSIONS:
        if row.sections <= sections.keys() and (text := row.message(sections)) is not None:
            yield clash(text, row.first.key, row.second.key)
    for names, rule in [*_RULES.items(), *_rules_of_features()]:
        if all(sections.get(name) is not None for name in names):
            yield from rule(*(sections[name] for name in names))
    for name, section in sections.items():
        if isinstance(section, Section):
            yield from section.contradictions()
            yield from _of_features(name, section)
        yield from _secrets(section.model_dump(mode="json") if isinstance(section, Section) else section, (name,))


def _rules_of_features() -> Iterator[tuple[Sequence[str], Callable[..., Iterator[Contradiction]]]]:
    """Yield the names of the sections of registered rules, and the rules."""
    for row in registered("rule"):
        # Two rules may have the same sections, so their names are keys.
        yield [key.partition(".")[0] for key in row.name.split()], resolved(row.value)


def _of_features(name: str, section: Section) -> Iterator[Contradiction]:
    """Yield the contradictions of the keys that features have added to a section."""
    for row in registered("keys"):
        keys = resolved(row.value)
        is_of = row.name.partition(".")[0] == name and isinstance(section, extended(row))
        if is_of and "contradictions" in vars(keys):  # without own ones, those of the section would come twice
            yield from keys.contradictions(section)


def message(contradiction: Contradiction) -> str:
    return f"`{dotted(contradiction.keys[0])}` {contradiction.text}"


def _secrets(value: Any, path: tuple[str, ...]) -> Iterator[Contradiction]:
    """Refuse addresses with secrets, because a run writes its recipe to files and sends it to tracking services."""
    for inner, leaf in leaves(value, path):
        if has_secret(str(leaf)):
            yield Contradiction(
                (inner,),
                "must hold no password, signature or token, which the run would write to its files; give it in the"
                " environment (HF_TOKEN, FSSPEC_FTP_PASSWORD, AWS_SECRET_ACCESS_KEY) or in fsspec's configuration",
            )


def _of_model_and_parallel(model: Model, parallel: Parallel) -> Iterator[Contradiction]:
    if model.adapter is not None and parallel.strategy == "dp":
        yield clash(NO_DP, "model.adapter", "parallel.strategy")
    if parallel.load == "broadcast" and model.config is not None and model.is_random:
        text = 'is "broadcast", which sends weights of files, but the weights are random (`model.config`); remove it'
        yield clash(text, "parallel.load", "model.config")


def _of_task_and_model(task: TaskSection, model: Model) -> Iterator[Contradiction]:
    reads_text = task.other_inputs is None
    if reads_text and model.config is not None and model.is_random and model.tokenizer is None:
        text = "is missing, and random weights (`model.config`) have no tokenizer; set it"
        yield clash(text, "model.tokenizer", "model.config")
    if not reads_text and model.tokenizer is not None:
        yield clash(f"applies to texts, but `task.type` is {task.type}; remove it", "model.tokenizer", "task.type")


def _of_task_and_data(task: TaskSection, data: Data) -> Iterator[Contradiction]:
    if task.other_inputs is not None:
        for key in data.changed("max_length", "group_by_length", "pad_to", "padding_free"):
            yield clash(f"applies to texts, but `task.type` is {task.type}; remove it", f"data.{key}", "task.type")
    else:
        yield from _padded_lengths(task, data)
    if data.date is not None and not task.traits.chats:
        yield clash(f"applies to chats, but `task.type` is {task.type}; remove it", "data.date", "task.type")
    stride = getattr(task, "stride", None)
    if stride is not None and stride >= data.max_length:
        rule = f"must be below `data.max_length` {data.max_length}, the size of the windows that share these tokens"
        yield clash(f"{rule}, but is {stride}", "task.stride", "data.max_length")
    if data.padding_free and getattr(task, "packing", "none") == "documents":
        text = 'is true, but rows of several documents (`task.packing` "documents") have no padding; set it to false'
        yield clash(text, "data.padding_free", "task.packing")
    weights = getattr(task, "class_weights", None)
    if isinstance(data, FileData) and data.mixture is not None and weights == "balanced":
        text = "counts every row once, but `data.mixture` changes how often each is read; write the weights"
        yield clash(f'is "balanced", which {text}', "task.class_weights", "data.mixture")


def _padded_lengths(task: TaskSection, data: Data) -> Iterator[Contradiction]:
    lengths = {"data.max_length": data.max_length}
    if (of_targets := getattr(task, "max_target_length", None)) is not None:
        lengths["task.max_target_length"] = of_targets
    for key, length in lengths.items():
        if length % data.pad_to:
            below = _divisor(math.gcd(*lengths.values()), data.pad_to)
            text = (
                f"must divide `{key}` {length}, so that no row is padded beyond it, but is {data.pad_to}; use {below}"
            )
            yield clash(text, "data.pad_to", key)


def _divisor(number: int, most: int) -> int:
    """Return the largest divisor of `number` up to `most`; of huge numbers, a smaller one."""
    small = (size for size in range(1, min(math.isqrt(number), 2**16) + 1) if number % size == 0)
    return max(divisor for size in small for divisor in (size, number // size) if divisor <= most)


def _of_task_and_training(task: TaskSection, training: Training) -> Iterator[Contradiction]:
    key, rows = "training.micro_batch_tokens", "training.micro_batch_size"
    if training.micro_batch_tokens is not None and task.other_inputs is not None:
        yield clash(f"applies to texts, but `task.type` is {task.type}; use `{rows}`", key, "task.type")
    elif training.micro_batch_tokens is not None and training.micro_batch_size and training.changed("micro_batch_size"):
        yield clash(f"is set, but `{rows}` is {training.micro_batch_size}; set one of them to null", key, rows)
    size, least = training.global_batch_size, task.fewest_rows
    if size < least:
        text = f"must be at least {least} for {task.joint_loss}, which compares rows with each other, but is {size}"
        yield clash(text, "training.global_batch_size", "task.loss")


def _of_task_and_parallel(task: TaskSection, parallel: Parallel) -> Iterator[Contradiction]:
    strategy = "parallel.strategy"
    if parallel.strategy == "dp" and task.joint_loss is not None:
        problem = f"{task.joint_loss} compares all rows of the batch"
        text = f"is dp, in which each copy of the model computes the loss of its own rows, but {problem}; use ddp"
        yield clash(text, strategy, "task.loss")


def _of_compile_data_and_parallel(compiles: bool, data: Data, parallel: Parallel) -> Iterator[Contradiction]:
    if compiles and data.padding_free and parallel.sequence:
        text = "is true, but with `data.padding_free` and `compile`, each microbatch would need a compilation for the"
        yield clash(f"{text} positions of a rank; set one of them to false", "parallel.sequence", "compile")


def _of_training_and_schedule(training: Training, schedule: ScheduleKeys) -> Iterator[Contradiction]:
    warmup, last = schedule.warmup, training.max_steps
    if isinstance(warmup, int) and last is not None and warmup >= last:
        text = (
            f"must be below `training.max_steps` {last}, but is {warmup}; a number below 1 is a fraction of the steps"
        )
        yield clash(text, "schedule.warmup", "training.max_steps")
        return
    parts = {key: getattr(schedule, key) for key in schedule.phases}
    if last is None and not all(isinstance(part, float) for part in parts.values()):
        return  # the number of steps depends on the data
    # Without a last step, all parts are fractions, which any total compares.
    total = last or 1
    if sum(part if isinstance(part, int) else part * total for part in parts.values()) > total:
        whole = f"`training.max_steps` {last}" if last else "all steps"
        key, part = parts.popitem()
        others = " and ".join(f"`schedule.{name}` {value}" for name, value in parts.items())
        text = f"is {part}, with {others} more than {whole}; shorten one of them"
        yield clash(text, f"schedule.{key}", *(f"schedule.{name}" for name in parts))


def _of_task_and_evaluation(task: TaskSection, evaluation: Evaluation) -> Iterator[Contradiction]:
    allowed = task.selecting
    if evaluation.best is not None and evaluation.best not in allowed:
        text = f"must be one of `task.metrics` or loss ({', '.join(allowed)}), but is {shown_value(evaluation.best)}"
        yield clash(text, "evaluation.best", "task.metrics")


def _of_data_and_evaluation(data: Data, evaluation: Evaluation) -> Iterator[Contradiction]:
    # Keys that were written, because defaults must suit a recipe without a validation split.
    written = evaluation.model_fields_set
    if data.validation is None and "every" in written and evaluation.every is not None:
        text = (
            f'is "{evaluation.every}", but `data.validation` is null; set a validation split, or set this key to null'
        )
        yield clash(text, "evaluation.every", "data.validation")
    if data.validation is None or evaluation.every is None:
        cause = "data.validation" if data.validation is None else "evaluation.every"
        for key in ("best", "patience"):
            if key in written and getattr(evaluation, key) is not None:
                text = f"requires evaluations, but `{cause}` is null; set that, or remove this key"
                yield clash(text, f"evaluation.{key}", cause)


def _of_model_and_training(model: Model, training: Training) -> Iterator[Contradiction]:
    first, last = model.unfreeze_at_step, training.max_steps
    if first is not None and last is not None and first >= last:
        text = f"must be below `training.max_steps` {last}, but is {first}; use an earlier step, or null"
        yield clash(text, "model.unfreeze_at_step", "training.max_steps")


_RULES: dict[tuple[str, ...], Callable[..., Iterator[Contradiction]]] = {
    ("task", "parallel"): _of_task_and_parallel,
    ("model", "parallel"): _of_model_and_parallel,
    ("model", "training"): _of_model_and_training,
    ("task", "model"): _of_task_and_model,
    ("task", "data"): _of_task_and_data,
    ("task", "training"): _of_task_and_training,
    ("training", "schedule"): _of_training_and_schedule,
    ("compile", "data", "parallel"): _of_compile_data_and_parallel,
    ("task", "evaluation"): _of_task_and_evaluation,
    ("data", "evaluation"): _of_data_and_evaluation,
}
"""Rules by the sections that are their arguments."""
