"""A first recipe: task, model, length and batch for some data, each with its reason."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trainer.base.errors import Problems, TrainerError, UsageError
from trainer.base.file_formats import file_formats
from trainer.base.text import size
from trainer.data.formats.base import CellKind
from trainer.data.formats.table import format_of
from trainer.data.sources import load_splits
from trainer.models.configuration import load_config, max_positions
from trainer.models.tokenizer import load_tokenizer
from trainer.recipe.local_parts import LocalParts
from trainer.recipe.plan import plan_run
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.registered import task_sections
from trainer.recipe.schema import FileData
from trainer.recipe.schema.task_keys import Start
from trainer.tools.check import MOST_ROWS, check_local_parts
from trainer.tools.init.columns import Column, columns_of
from trainer.tools.init.draft import Draft, InitRequest
from trainer.tools.init.shapes import Shape, notes, shapes
from trainer.tools.init.sources import data_keys, devices_here, folder_name
from trainer.tools.plan.hardware import Devices, parse_devices
from trainer.tools.plan.recipe_plan import halves, plan_recipe
from trainer.tools.writing import recipe_name
from trainer.training.run_data import PreparedData

SAMPLE = "sample"
"""The word for the model of a shipped sample: a small one with random weights, which needs no network."""

_LENGTHS = (16, 32, 64, 128, 256, 512, 1024)
_COVERED = 0.95
"""The share of the rows that the maximum length leaves whole."""
_BYTES_OF_A_TOKEN = 4  # for a tokenizer on the hub
_LARGEST_STEP, _FEWEST_STEPS = 32, 8  # rows of a step, and steps of an epoch: few rows get smaller steps
_HELD_OUT, _FEWEST_TO_HOLD_OUT = 0.1, 10
_UNKNOWN_BATCH = 8


class Ask(Protocol):
    """Answers a question with one of the choices, if there are any; `default` is the proposal."""

    def __call__(self, question: str, default: str, choices: Sequence[str] = ()) -> str: ...


def take_default(question: str, default: str, choices: Sequence[str] = ()) -> str:
    """Answer a question by its default."""
    return default


@dataclass(frozen=True)
class Proposal:
    """The text of a recipe, lines that explain it, and problems of data and model."""

    text: str
    lines: tuple[str, ...]
    problems: tuple[str, ...]


def propose(request: InitRequest, ask: Ask = take_default) -> Proposal:
    """Look at data, and propose a recipe.

    Raises:
        TrainerError: the data cannot be read, no task fits it, or an override is wrong.
    """
    draft = Draft(request)
    draft.put("name", recipe_name(request.source))
    rows, is_whole, own_notes = _read(draft)
    columns: Sequence[Column] = columns_of(rows, MOST_ROWS)
    shape = _shape(columns, request, ask, own_notes)
    shape, columns = _with_classes(shape, columns, draft)
    number = f"{len(rows):,}" if is_whole else f"more than {len(rows):,}"
    lines = [f"data      {number} rows of {', '.join(column.shown for column in columns)}"]
    repeated = [column.name for column in columns if column.name in column.distinct]
    if repeated and _has_header(request.source):
        lines.append(
            f"note      the first line gives the columns their names, but `{repeated[0]}` is also a value there; if"
            " that line is a row, add a line of names"
        )
    lines.append(f"task      {_put_task(draft, shape)}")
    lines.append(f"model     {_put_model(draft, shape.type, ask)}")
    _put_rows(draft, len(rows))
    devices = parse_devices(request.gpus or ask("device, as `trainer plan --gpus` takes it", devices_here()))
    if devices.machine is not None and devices.machine.runs_kernels:
        draft.put("precision", "bf16", f"{devices.name} computes in it")
    most = _most_tokens(draft)
    longest = [] if most is None else [f"data.max_length={most}"]
    # The check needs a plan before the size of microbatches is known; `_put_batch` finds it after the length.
    checked = check_local_parts(plan_run(draft.resolved(["training.micro_batch_size=1", *longest]).recipe, 1))
    if most is not None:
        lines.append(f"length    {_put_length(draft, most, checked.data)}")
    lines.append(f"batch     {_put_batch(draft, devices)}")
    draft.resolved()
    label_notes = notes(columns, shape, "task.label" in request.given)
    lines += [f"note      {note}" for note in (*label_notes, *checked.notes)]
    lines += [f"unchecked {part}" for part in checked.local.unchecked]
    return Proposal(draft.text(), tuple(lines), tuple(checked.problems.messages))


def _with_classes(shape: Shape, columns: Sequence[Column], draft: Draft) -> tuple[Shape, Sequence[Column]]:
    """Return task and columns with the classes that are read: a column of 1e5 and +1 holds numbers, or their names."""
    label = next((column for column in columns if column.name == shape.task.get("label")), None)
    is_typed = _has_header(draft.request.source) and _has_one_label(shape)
    names_classes = is_typed and "labels" in task_sections()[shape.type].model_fields
    if not names_classes or label is None or label.kind == "text" or shape.columns is not None:
        return shape, columns
    read = {column.name: column for column in columns_of(_read(draft, {label.name: "class"})[0], MOST_ROWS)}
    found = shapes(list(read.values()), {key: shape.task[key] for key in ("text", "label")})
    made = next((replace(one, labels=shape.labels) for one in found if one.type == shape.type), shape)
    return made, [read[label.name] if column is label else column for column in columns]


def _read(draft: Draft, kinds: Mapping[str, CellKind] | None = None) -> tuple[Any, bool, Sequence[str]]:
    """Return rows of the training split, whether they are all, and notes on them; set the section `data`.

    `kinds` are those of columns of CSV files that a task reads, if it is known.

    Raises:
        TrainerError: the data cannot be read.
    """
    request = draft.request
    for key, value in data_keys(request.source, Path(os.path.abspath(request.output)).parent).items():
        draft.put(f"data.{key}", value)
    stub = Draft(replace(request, overrides=tuple(word for word in request.overrides if word.startswith("data."))))
    stub.values.update(
        draft.values, name="stub", task={"type": "masked_lm", "text": "text"}, model={"name_or_path": "a/b"}
    )
    data = stub.resolved().recipe.data  # of a stub, because the task is not known yet
    problems = Problems()
    splits = load_splits(data, most_rows=MOST_ROWS, problems=problems, kinds=kinds)
    if not isinstance(data, FileData) and splits.validation is not None:
        draft.put("data.validation", data.validation)
    elif isinstance(data, FileData) or "data.validation" in request.given:
        problems.raise_all()
    return splits.train.rows, splits.train.is_whole, splits.notes


def _shape(columns: Sequence[Column], request: InitRequest, ask: Ask, own_notes: Sequence[str]) -> Shape:
    """Return the task of the columns, and ask if several fit.

    Raises:
        UsageError: none fits.
    """
    may_map = "map" in FileData.model_fields and not any(key.startswith("data.map") for key in request.given)
    found: dict[str, Shape] = {}  # the likeliest of each type
    for shape in shapes(columns, request.given_columns):
        if shape.columns is None or may_map:
            found.setdefault(shape.type, shape)
    if (kind := request.given.get("task.type")) is not None:
        return found.get(kind, Shape({"type": kind}, "as given"))
    if len(columns[0].values) == 1 and columns[0].kind == "objects":
        raise UsageError(
            f"`{request.source}` holds one object with the rows in it, as files of SQuAD do; write a line for each row:"
            f" its `{columns[0].name}` is a list"
        )
    if not found:
        raise UsageError(
            f"no task fits the columns of `{request.source}`: {', '.join(column.shown for column in columns)}; name the"
            " task and its columns, as in task.type=sequence_classification task.text=COLUMN task.label=COLUMN"
            + "".join(f" (note: {note})" for note in own_notes)
        )
    kinds = list(found)
    shape = found[ask("task", kinds[0], kinds) if len(kinds) > 1 else kinds[0]]
    return _with_columns(shape, columns, request, ask) if _has_one_label(shape) and len(columns) > 2 else shape


def _with_columns(shape: Shape, columns: Sequence[Column], request: InitRequest, ask: Ask) -> Shape:
    """Return the task with the text and the label that the user chooses, of the same type if these allow it."""
    names, chosen = [column.name for column in columns], request.given_columns
    for key in ("text", "label"):
        if shape.task[key] in names and f"task.{key}" not in request.given:
            answer = ask(f"column of the {key}", shape.task[key], names)
            if answer != shape.task[key]:
                chosen[key] = answer
    again = [one for one in shapes(columns, chosen) if _has_one_label(one)]
    return min(again, key=lambda one: one.type != shape.type, default=shape)


def _has_header(source: Path) -> bool:
    """Return whether the format of a file has the names of the columns in its first row."""
    name = format_of(source)
    return name is not None and file_formats()[name].has_header


def _has_one_label(shape: Shape) -> bool:
    """Return whether the user may choose the columns: a text and its label."""
    return {"text", "label"} <= shape.task.keys()


def _put_task(draft: Draft, shape: Shape) -> str:
    if shape.columns is not None:
        draft.put("data.map", {"columns": shape.columns}, "the columns of the task, made from those of the data")
    for key, value in shape.task.items():
        draft.put(f"task.{key}", value, shape.why if key == "type" else "")
    return f"{shape.type}: {shape.why}"


def _put_model(draft: Draft, kind: str, ask: Ask) -> str:
    start = task_sections()[kind].start if kind in task_sections() else Start()
    hub, rate = start.model, start.learning_rate
    name = draft.request.model
    if name is None and not any(key.startswith("model.") for key in draft.request.given):
        name = ask(f"model ({SAMPLE}, a folder, or a name on the hub such as {hub})", SAMPLE)
    draft.put("schedule.warmup", 0.1, "the share of the steps in which the learning rate rises")
    if name != SAMPLE:
        if name is not None:
            model, recipe = Path(name).expanduser(), Path(os.path.abspath(draft.request.output))
            draft.put("model.name_or_path", folder_name(model, recipe.parent) if model.is_dir() else name)
        draft.put("training.epochs", 3)
        draft.put("optimizer.learning_rate", rate)
        return name or "as given"
    if tools := draft.values.get("task", {}).pop("tools", None):
        draft.comments["task.messages"] = f"the sample writes no tools; with a pretrained model add tools: {tools}"
    sample = load_recipe(start.sample).recipe
    draft.comments["model"] = f"small, random weights; for pretrained ones: name_or_path: {hub}"
    draft.put("model.config", sample.model.config)
    if sample.model.tokenizer:
        draft.put("model.tokenizer", sample.model.tokenizer)
    draft.put("training.epochs", sample.training.epochs, "pretrained: 3")
    draft.put("optimizer.learning_rate", sample.optimizer.learning_rate, f"pretrained: {rate:g}")
    return f"that of {sample.name}, small, random weights, to see that all works; --model {hub} is pretrained"


def _put_rows(draft: Draft, number: int) -> None:
    """Set the validation split, if the data has none, and the rows of a step."""
    if "validation" not in draft.values["data"]:
        if number < _FEWEST_TO_HOLD_OUT:
            draft.put("data.validation", None, f"{number} rows are too few to hold some out")
        else:
            other = "file" if draft.get("data.source") == "files" else "split"
            draft.put("data.validation", _HELD_OUT, f"the share of the rows to hold out, or a {other}")
    fitting = min(_LARGEST_STEP, max(1, number // _FEWEST_STEPS))
    # A power of two divides among the usual numbers of devices.
    draft.put("training.global_batch_size", 2 ** (fitting.bit_length() - 1), "rows of a step, over all devices")


def _most_tokens(draft: Draft) -> int | None:
    """Return the most tokens of a text that the model takes; None: the user gives it, or there are no texts."""
    if "data.max_length" in draft.request.given:
        return None
    recipe, most = draft.resolved().recipe, _LENGTHS[-1]
    if recipe.task.other_inputs is not None:
        return None
    model = recipe.model
    has_model, has_tokenizer = _is_here(draft)
    if has_model:
        most = min(most, max_positions(load_config(model, {})) or most)
    return min(most, int(load_tokenizer(model).model_max_length)) if has_tokenizer else most


def _is_here(draft: Draft) -> tuple[bool, bool]:
    """Return whether the model and its tokenizer are on this machine."""
    local = LocalParts.of(draft.resolved().recipe)
    return local.has_model, local.has_model and local.has_tokenizer


def _put_length(draft: Draft, most: int, data: PreparedData | None) -> str:
    if data is None:
        draft.put("data.max_length", min(most, 128), "a guess: the rows could not be read")
        return f"{min(most, 128)} tokens, a guess: the rows could not be read"
    lengths = data.train.lengths
    unit = "tokens"
    if not _is_here(draft)[1]:
        lengths, unit = -(-lengths // _BYTES_OF_A_TOKEN), f"tokens, by {_BYTES_OF_A_TOKEN} bytes of text for each"
    # A length that some row has, so that at least this share of the rows is covered.
    covered = int(np.quantile(lengths, _COVERED, method="higher"))
    length = next((size for size in _LENGTHS if covered <= size <= most), most)
    why = f"{np.mean(lengths <= length):.0%} of the rows have at most so many {unit}"
    if covered >= most:  # longer rows were truncated to be counted
        why = f"the most of the model; {np.mean(lengths >= most):.0%} of the rows have as many {unit} or more"
    draft.put("data.max_length", length, why)
    return f"{length} tokens: {why}"


def _put_batch(draft: Draft, devices: Devices) -> str:
    key, total = "training.micro_batch_size", draft.get("training.global_batch_size")
    if key in draft.request.given:
        return "as given"
    made, problem = None, ""
    for micro in (total, *halves(total)):
        try:
            made = plan_recipe(draft.resolved([f"{key}={micro}"]), replace(devices, number=1))
        except TrainerError as error:
            problem = str(error).splitlines()[0]
            break
        if made.fits:
            break
    if made is None:
        draft.put(key, min(_UNKNOWN_BATCH, total), "a guess: no plan could be made")
        return f"rows of a step: {total}; at most {min(_UNKNOWN_BATCH, total)} in a forward pass, a guess: {problem}"
    planned = f"{size(made.needed)} of {size(made.devices.memory_bytes)} of {devices.name}"
    draft.put(key, micro, f"most rows of a forward pass; planned: {planned}")
    verdict = "planned: " if made.fits else "which does not fit, see `trainer plan`: "
    return f"rows of a step: {total}; at most {micro} in a forward pass, {verdict}{planned}"
