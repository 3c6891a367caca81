"""Rules that span several keys of a recipe and need neither the world size nor the data.

Each rule sees sections that are valid by themselves, with their paths already absolute. To add one, write a generator
and its row in `RULES`; two conditions that exclude each other are a row of `combinations.py`.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.reading.parser import KeyPath, dotted, shown_value
from trainer.recipe.combinations import EXCLUSIONS
from trainer.recipe.deepspeed import refused_keys
from trainer.recipe.schedules import SCHEDULES
from trainer.recipe.schema import (
    Checkpoint,
    ClassificationKeys,
    Evaluation,
    FileData,
    FolderData,
    HubData,
    ImageKeys,
    Logging,
    Model,
    Parallel,
    Schedule,
    TaskSection,
    Training,
)

Data = HubData | FileData | FolderData


@dataclass(frozen=True)
class Contradiction:
    """Keys that do not go together; reported where the first of them stands."""

    keys: tuple[KeyPath, ...]
    text: str  # follows the first key


def contradictions(sections: Mapping[str, Any]) -> Iterator[Contradiction]:
    """Every rule that these sections break; a rule is left out where a section that it needs is not there."""
    for row in EXCLUSIONS:
        if row.sections <= sections.keys() and (text := row.message(sections)) is not None:
            yield _clash(text, row.first.key, row.second.key)
    for names, rule in RULES:
        if all(name in sections for name in names):
            yield from rule(*(sections[name] for name in names))


def _clash(text: str, *keys: str) -> Contradiction:
    return Contradiction(tuple(tuple(key.split(".")) for key in keys), text)


def _weights(model: Model) -> Iterator[Contradiction]:
    if model.name_or_path is None and model.config is None:
        yield _clash("is missing; write it, or `model.config` for random weights", "model.name_or_path", "model.config")
    if model.name_or_path is not None and model.config is not None:
        yield _clash(
            "and `model.name_or_path` exclude each other: random or pretrained weights; set one of them to null",
            "model.config",
            "model.name_or_path",
        )
    if model.config is not None:
        yield from _random_weights(model, model.config)


def _random_weights(model: Model, config: dict[str, Any]) -> Iterator[Contradiction]:
    if not isinstance(config.get("model_type"), str):
        yield _clash('must hold a "model_type", such as "bert"', "model.config")
    if model.revision is not None and model.name_or_path is None:
        yield _clash("is of a hub repository; random weights (`model.config`) have none", "model.revision")


def _tokenizer(task: TaskSection, model: Model) -> Iterator[Contradiction]:
    reads_text = not isinstance(task, ImageKeys)
    if reads_text and model.config is not None and model.tokenizer is None:
        yield _clash(
            "is missing; random weights (`model.config`) bring no tokenizer, so name one",
            "model.tokenizer",
            "model.config",
        )
    if not reads_text and model.tokenizer is not None:
        yield _clash(
            f"is for texts, but `task.type` is {task.type}, which reads none; remove it", "model.tokenizer", "task.type"
        )


def _text_lengths(task: TaskSection, data: Data) -> Iterator[Contradiction]:
    """Refuses what counts tokens where there are none."""
    if not isinstance(task, ImageKeys):
        return
    for key, written in (
        ("max_length", "max_length" in data.model_fields_set),
        ("group_by_length", data.group_by_length),
    ):
        if written:
            yield _clash(
                f"is of texts, but `task.type` is {task.type}, whose rows are all of one size; remove it",
                f"data.{key}",
                "task.type",
            )


def _model_folders(model: Model) -> Iterator[Contradiction]:
    for key, place in (("model.name_or_path", model.name_or_path), ("model.tokenizer", model.tokenizer)):
        if place and os.path.isabs(place) and not os.path.isdir(place):
            yield _clash(f"is a folder that does not exist: {place}", key)
    if model.revision and model.name_or_path and os.path.isabs(model.name_or_path):
        yield _clash("is of a hub repository, but `model.name_or_path` is a folder; remove it", "model.revision")


def _data_places(data: Data) -> Iterator[Contradiction]:
    if isinstance(data, FileData):
        for split in ("train", "validation"):
            yield from _files(split, getattr(data, split))
    elif isinstance(data, FolderData):
        if not os.path.isdir(data.path):
            yield _clash(f"is a folder that does not exist: {data.path}", "data.path")
    elif os.path.isabs(data.name):
        if not os.path.isdir(data.name):
            yield _clash(f"is a folder that does not exist: {data.name}", "data.name")
        if data.revision is not None:
            yield _clash("is of a hub repository, but `data.name` is a folder; remove it", "data.revision")


def _files(split: str, places: str | list[str] | None) -> Iterator[Contradiction]:
    single = isinstance(places, str)
    for index, place in enumerate([places] if isinstance(places, str) else places or ()):
        if not os.path.isfile(place):
            path: KeyPath = ("data", split) if single else ("data", split, index)
            yield Contradiction((path,), f"is a file that does not exist: {place}")


def _columns(task: TaskSection) -> Iterator[Contradiction]:
    label = getattr(task, "label", None)
    if isinstance(task, ImageKeys):
        if label == task.image:
            yield _clash(f"is {shown_value(label)}, which `task.image` names as the image", "task.label", "task.image")
        return
    text = [task.text] if isinstance(task.text, str) else task.text
    if len(set(text)) < len(text):
        yield _clash(f"names the column {shown_value(text[0])} twice; a pair is two columns", "task.text")
    if label in text:
        yield _clash(f"is {shown_value(label)}, which `task.text` names as a text", "task.label", "task.text")


def _labels(task: TaskSection) -> Iterator[Contradiction]:
    yield from _repeated("task.metrics", task.metrics)
    if not isinstance(task, ClassificationKeys) or task.labels is None:
        return
    yield from _repeated("task.labels", task.labels)
    if "f1" in task.metrics and len(task.labels) != 2:
        yield _clash(
            f'holds "f1", which needs two classes, but `task.labels` has {len(task.labels)}; use "f1_macro"',
            "task.metrics",
            "task.labels",
        )


def _repeated(key: str, values: list[Any]) -> Iterator[Contradiction]:
    for value in (value for value, count in Counter(values).items() if count > 1):
        yield _clash(f"holds {shown_value(value)} more than once", key)


def _deepspeed_keys(parallel: Parallel) -> Iterator[Contradiction]:
    for path, reason in refused_keys(parallel.deepspeed):
        yield Contradiction((("parallel", "deepspeed", *path),), reason)


def _pipeline(parallel: Parallel) -> Iterator[Contradiction]:
    pipeline = parallel.pipeline
    if pipeline.stages == 1:
        for key, field in type(pipeline).model_fields.items():
            if getattr(pipeline, key) == field.default:  # also where it is written, as `trainer check --json` does
                continue
            yield _clash(
                "is of a pipeline, but `parallel.pipeline.stages` is 1; set that, or remove this key",
                f"parallel.pipeline.{key}",
                "parallel.pipeline.stages",
            )
        return
    num_stages = pipeline.stages * (pipeline.stages_per_rank or SCHEDULES[pipeline.schedule].stages_per_rank)
    if pipeline.split is not None and len(pipeline.split) != num_stages - 1:
        yield _clash(
            f"must name the first layer of each of the {num_stages} stages but the first, {num_stages - 1} in all, but"
            f" names {len(pipeline.split)}",
            "parallel.pipeline.split",
            "parallel.pipeline.stages",
        )


def _steps(training: Training) -> Iterator[Contradiction]:
    stop, last = training.stop_at_step, training.max_steps
    if stop is not None and last is not None and stop > last:
        yield _clash(
            f"must be at most `training.max_steps` {last}, but is {stop}", "training.stop_at_step", "training.max_steps"
        )


def _warmup(training: Training, schedule: Schedule) -> Iterator[Contradiction]:
    warmup, last = schedule.warmup, training.max_steps
    if isinstance(warmup, int) and last is not None and warmup >= last:
        yield _clash(
            f"must be below `training.max_steps` {last}, but is {warmup}; a number below 1 is a share of the steps",
            "schedule.warmup",
            "training.max_steps",
        )


def _best_metric(task: TaskSection, evaluation: Evaluation) -> Iterator[Contradiction]:
    allowed = [*task.metrics, "loss"]
    if evaluation.best is not None and evaluation.best not in allowed:
        yield _clash(
            f"must be one of `task.metrics` or loss ({', '.join(allowed)}), but is {shown_value(evaluation.best)}",
            "evaluation.best",
            "task.metrics",
        )


def _nothing_evaluated(data: Data, evaluation: Evaluation) -> Iterator[Contradiction]:
    written = evaluation.model_fields_set
    if data.validation is None and "every" in written and evaluation.every is not None:
        yield _clash(
            f'is "{evaluation.every}", but there is no `data.validation` to evaluate on; name one, or write null',
            "evaluation.every",
            "data.validation",
        )
    if data.validation is None or evaluation.every is None:
        reason = "`data.validation` is null" if data.validation is None else "`evaluation.every` is null"
        for key in ("best", "patience"):
            if key in written and getattr(evaluation, key) is not None:
                yield _clash(
                    f"needs evaluations, but {reason}", f"evaluation.{key}", "evaluation.every", "data.validation"
                )


def _folder_name(checkpoint: Checkpoint) -> Iterator[Contradiction]:
    for placeholder in re.findall(r"\{.*?\}", checkpoint.folder):
        if placeholder != "{name}":
            yield _clash(f"holds {shown_value(placeholder)}; only {{name}} is replaced", "checkpoint.folder")


def _project(logging: Logging) -> Iterator[Contradiction]:
    if logging.project is not None and not {"wandb", "mlflow"} & set(logging.to):
        yield _clash(
            'is read by "wandb" and "mlflow" alone, but `logging.to` holds neither; add one, or write null',
            "logging.project",
            "logging.to",
        )


RULES: tuple[tuple[tuple[str, ...], Callable[..., Iterator[Contradiction]]], ...] = (
    (("task",), _columns),
    (("task",), _labels),
    (("model",), _weights),
    (("task", "model"), _tokenizer),
    (("task", "data"), _text_lengths),
    (("model",), _model_folders),
    (("data",), _data_places),
    (("parallel",), _pipeline),
    (("parallel",), _deepspeed_keys),
    (("training",), _steps),
    (("training", "schedule"), _warmup),
    (("task", "evaluation"), _best_metric),
    (("data", "evaluation"), _nothing_evaluated),
    (("checkpoint",), _folder_name),
    (("logging",), _project),
)
"""The sections that a rule takes, and the rule."""


def message(contradiction: Contradiction) -> str:
    """The contradiction as a sentence."""
    return f"`{dotted(contradiction.keys[0])}` {contradiction.text}"
