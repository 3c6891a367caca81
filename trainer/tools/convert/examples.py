"""Conversion of model, data and task from the arguments of the example scripts of transformers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.tools.convert.draft import Draft, Outcome
from trainer.tools.convert.foreign.values import Todo
from trainer.tools.convert.running import METRICS
from trainer.tools.convert.sources import Item, Tool

_TA = Tool.TRAINING_ARGUMENTS


@dataclass(frozen=True)
class _Glue:
    """Columns, metrics and validation split of one task of GLUE (Wang et al. 2018)."""

    text: str | list[str]
    metrics: tuple[str, ...] = ("accuracy",)
    type: str = "sequence_classification"
    validation: str = "validation"


_GLUE = {
    "cola": _Glue("sentence", ("matthews",)),
    "mnli": _Glue(["premise", "hypothesis"], validation="validation_matched"),
    "mrpc": _Glue(["sentence1", "sentence2"], ("accuracy", "f1")),
    "qnli": _Glue(["question", "sentence"]),
    "qqp": _Glue(["question1", "question2"], ("accuracy", "f1")),
    "rte": _Glue(["sentence1", "sentence2"]),
    "sst2": _Glue("sentence"),
    "stsb": _Glue(["sentence1", "sentence2"], ("pearson", "spearman"), "sequence_regression"),
    "wnli": _Glue(["sentence1", "sentence2"]),
}
_SMOOTHED = ("sequence_classification", "image_classification")
TABLES = (".json", ".jsonl", ".csv", ".parquet")
"""The endings of files of rows."""
_EXAMPLES = {
    "model": '{"name_or_path": "google-bert/bert-base-uncased"}',
    "data": '{"source": "files", "train": "train.csv", "validation": "validation.csv"}',
    "task": '{"type": "sequence_classification", "text": "sentence", "label": "label"}',
}


def examples(draft: Draft, folder: Path) -> None:
    """Convert model, data and task.

    Args:
        folder: The folder of the recipe, the base of its paths. Paths of the scripts are relative to the current one.
    """
    _model(draft, folder)
    glue = _data(draft, folder)
    _task(draft, glue)
    _metrics(draft, glue)
    smoothing(draft)
    if draft.value("data.source") is None:
        draft.missing["data"] = f"the source of the rows; for example {_EXAMPLES['data']}"


def moved(place: str, folder: os.PathLike[str]) -> str:
    """Return a path relative to the folder of the recipe."""
    return place if os.path.isabs(place) else os.path.relpath(place, folder)


def _model(draft: Draft, folder: Path) -> None:
    given = draft.sources.given
    items = draft.sources.all_given(_TA, "model_name_or_path", "model_name")
    for item in items:
        draft.take("model.name_or_path", folder_or_name(draft.text(item), folder), item)
    if not items:
        draft.missing["model"] = f"for example {_EXAMPLES['model']}"
    if tokenizer := given(_TA, "tokenizer_name"):
        draft.take("model.tokenizer", folder_or_name(draft.text(tokenizer), folder), tokenizer)
    if config := given(_TA, "config_name"):
        draft.say(config, Outcome.NONE, "`model.config` has the configuration as an object, for random weights")


def folder_or_name(name: str, folder: os.PathLike[str]) -> str:
    """Return a name on the hub, or the path of a folder relative to that of the recipe."""
    if not os.path.isdir(name):
        return name
    path = moved(name, folder)
    return path if path.startswith((".", "/")) else f"./{path}"


def _data(draft: Draft, folder: Path) -> _Glue | None:
    given = draft.sources.given
    glue, name, train = given(_TA, "task_name"), given(_TA, "dataset_name"), given(_TA, "train_file")
    validation = given(_TA, "validation_file")
    splits = {"dataset_config_name": "subset", "train_split_name": "train", "validation_split_name": "validation"}
    found, used = None, set()
    if glue is not None:
        key = draft.text(glue).lower()
        found = _GLUE.get(key)
        if found is None:
            draft.refuse("data.subset", f"{key} is not a task of GLUE: {', '.join(_GLUE)}", glue)
        else:
            row = {"source": "hub", "name": "nyu-mll/glue", "subset": key, "validation": found.validation}
            for path, value in row.items():
                draft.take(f"data.{path}", value, glue)
        draft.unread("task_name has precedence", name, train, validation, given(_TA, "dataset_config_name"))
        used = {"validation_file", "dataset_config_name"}
    elif name is not None:
        draft.take("data.source", "hub", name)
        draft.take("data.name", folder_or_name(draft.text(name), folder), name)
        for theirs, ours in splits.items():
            if item := given(_TA, theirs):
                draft.take(f"data.{ours}", draft.text(item), item)
        draft.unread("dataset_name has precedence", train, validation)
        used = {*splits, "validation_file"}
    elif train is not None:
        draft.take("data.source", "files", train)
        for file in (train, *([validation] if validation else [])):
            _file(draft, file, f"data.{file.key.removesuffix('_file')}", folder)
        used = {"validation_file"}
    for key in {*splits, "validation_file"} - used:
        draft.unread("other keys name the source of the data", given(_TA, key))
    _held_out(draft)
    lengths(draft)
    return found


def _held_out(draft: Draft) -> None:
    share = draft.sources.given(_TA, "validation_split_percentage")
    if share is None:
        return
    if draft.value("data.validation") is None:
        note = "rows drawn by the seed; the scripts of transformers take the first ones"
        draft.take("data.validation", draft.number(share) / 100, share, note=note, differs=True)
    else:
        draft.unread("another key names the validation split", share)


def _file(draft: Draft, item: Item, path: str, folder: Path) -> None:
    place = draft.text(item)
    if place.lower().endswith(TABLES):
        draft.take(path, moved(place, folder), item)
    else:
        draft.refuse(path, f"{place} is not one of {', '.join(TABLES)}; for plain text write each line as JSON", item)


def lengths(draft: Draft) -> None:
    """Convert the maximum length and the grouping of rows by length."""
    length = draft.sources.written(_TA, "max_seq_length")
    if length is not None and length.value is not None:
        draft.take("data.max_length", draft.whole(length, 128), length)
    key = "train_sampling_strategy"
    sampling = draft.sources.written(_TA, key) or draft.sources.arguments.get(key)
    if sampling is None:
        return
    name = draft.text(sampling, "random")
    if name in ("random", "group_by_length"):
        draft.take("data.group_by_length", name == "group_by_length", sampling)
    elif name == "sequential" and sampling.is_default:  # of a program
        draft.say(sampling, Outcome.DIFFERS, "each epoch has another order, from the seed; there that of the file")
    else:
        draft.refuse_file(sampling, "each epoch has another order, from the seed")


def _task(draft: Draft, glue: _Glue | None) -> None:
    written = draft.sources.written
    columns = draft.sources.all_given(_TA, "text_column_names", "text_column_name")
    label = written(_TA, "label_column_name")
    image = written(_TA, "image_column_name")
    masked = draft.sources.all_given(_TA, "mlm", "mlm_probability")
    regression = written(_TA, "do_regression")
    if glue is not None:
        task = written(_TA, "task_name")
        assert task is not None
        draft.take("task.type", glue.type, task)
        draft.take("task.text", glue.text, task)
        draft.take("task.metrics", list(glue.metrics), task)
        draft.unread("task_name has precedence", *columns, label, regression, image, *masked)
        return
    if image is not None and image.value:
        draft.take("task.type", "image_classification", image)
        draft.take("task.image", draft.text(image), image)
        draft.unread("image_column_name has precedence", *columns, regression, *masked)
    elif masked:
        draft.take("task.type", "masked_lm", *masked)
        probability = written(_TA, "mlm_probability")
        if probability is not None:
            draft.take("task.mask_probability", draft.number(probability, 0.15), probability)
        _text(draft, columns)
        # The text itself has the labels, so the column of a label below is not for this task.
        draft.unread("masked language modelling has no labels", label, regression)
        return
    elif columns:
        if regression is not None and draft.flag(regression):
            draft.take("task.type", "sequence_regression", regression)
        else:
            draft.take("task.type", "sequence_classification", *columns, note="do_regression is not set")
            draft.say(regression, Outcome.SAME, "`task.type` is sequence_classification")
        _text(draft, columns)
    else:
        draft.missing["task"] = f"the task and its columns; for example {_EXAMPLES['task']}"
        kind = "sequence_regression" if draft.flag(regression) else "sequence_classification"
        draft.say(regression, Outcome.TODO, f"`task.type` {kind}, when `task.text` is set")
    if label is not None and label.value:
        if draft.value("task.type") is None:
            draft.say(label, Outcome.TODO, "`task.label`, when `task.text` is set")
        else:
            draft.take("task.label", draft.text(label), label)


def smoothing(draft: Draft) -> None:
    """Convert the smoothing of labels."""
    item = draft.sources.given(_TA, "label_smoothing_factor")
    if item is None:
        return
    kind = draft.value("task.type", _SMOOTHED[0])
    if kind in _SMOOTHED or isinstance(kind, Todo):
        draft.take("task.label_smoothing", draft.number(item), item)
    else:
        draft.refuse_file(item, f"labels are smoothed in {' and '.join(_SMOOTHED)}, but `task.type` is {kind}")


def _text(draft: Draft, columns: list[Item]) -> None:
    if not columns:
        draft.refuse("task.text", "the column that holds the text")
    for item in columns:
        names: Any = item.value if isinstance(item.value, list) else draft.text(item).split(",")
        if len(names) <= 2:
            draft.take("task.text", names[0] if len(names) == 1 else names, item)
        else:
            draft.refuse("task.text", f"one column or a pair, of {', '.join(map(str, names))}", item)


def _metrics(draft: Draft, glue: _Glue | None) -> None:
    item = draft.sources.given(_TA, "metric_name")
    if item is None:
        return
    name = METRICS.get(draft.text(item), draft.text(item))
    if glue is not None:
        draft.unread("task_name has precedence", item)
    elif draft.value("task.type") is None:
        draft.say(item, Outcome.TODO, f"`task.metrics` {name}, when `task.type` is set")
    else:
        draft.take("task.metrics", [name], item)
