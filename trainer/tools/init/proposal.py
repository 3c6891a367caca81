"""A first recipe: task, model, length and batch for some data, each with its reason."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trainer.base.errors import TrainerError, UsageError
from trainer.base.file_formats import file_formats
from trainer.base.text import listed, size
from trainer.data.formats.table import format_of
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
from trainer.tools.init.models import SAMPLE, learning_rate, needs_new_head, proposed_model
from trainer.tools.init.reading import left_out, read
from trainer.tools.init.shapes import Shape, names_read, notes, shapes, unlearnable
from trainer.tools.init.sources import devices_here, folder_name
from trainer.tools.plan.hardware import Devices, parse_devices
from trainer.tools.plan.recipe_plan import halves, plan_recipe
from trainer.tools.plan.shapes import shaped, shipped_models
from trainer.tools.writing import recipe_name
from trainer.training.run_data import PreparedData

_LENGTHS = (16, 32, 64, 128, 256, 512, 1024)
_COVERED = 0.95
"""The share of the rows that the maximum length leaves whole."""
_BYTES_OF_A_TOKEN = 4  # for a tokenizer on the hub
_LARGEST_STEP, _FEWEST_STEPS = 32, 8  # rows of a step, and steps of an epoch: few rows get smaller steps
_HELD_OUT, _FEWEST_TO_HOLD_OUT = 0.1, 10
_UNKNOWN_BATCH = 8
_MOST_COLUMNS = 12
_WHERE = "are left out by `data.map.where`"


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
    rows, is_whole, own_notes, other_rows = read(draft)
    columns: Sequence[Column] = columns_of(rows, MOST_ROWS)
    others = [] if other_rows is None else columns_of(other_rows, MOST_ROWS)
    shape, others_fit = _shape(columns, request, ask, own_notes)
    shape, columns = _with_classes(shape, columns, draft)
    lines = list(_data_lines(draft, columns, len(rows), is_whole))
    lines.append(f"task      {_put_task(draft, shape)}")
    num_left_out, about_rows = _put_where(draft, *left_out(columns, shape, is_whole, others))
    lines += about_rows
    lines.append(f"model     {_put_model(draft, shape.type, ask)}")
    _put_rows(draft, len(rows) - num_left_out)
    devices = parse_devices(request.gpus or ask("device, as `trainer plan --gpus` takes it", devices_here()))
    if devices.machine is not None and devices.machine.runs_kernels:
        draft.put("precision", "bf16", f"{devices.name} computes in it")
    most = _most_tokens(draft)
    longest = [] if most is None else [f"data.max_length={most}"]
    # The check needs a plan before the size of microbatches is known; `_put_batch` finds it after the length.
    early = ["training.micro_batch_size=1", *longest]
    checked = check_local_parts(plan_run(draft.resolved(early).recipe, 1))
    own_head = "model.new_head" not in request.given
    if own_head and needs_new_head(draft, checked.problems.messages, _classes(draft, columns)):
        draft.put("model.new_head", True, "the checkpoint has another number of classes")
        lines.append("head      a new one with random weights, since the checkpoint has another number of classes")
        checked = check_local_parts(plan_run(draft.resolved(early).recipe, 1))
    if most is not None:
        lines.append(f"length    {_put_length(draft, most, checked.data)}")
    lines.append(f"batch     {_put_batch(draft, devices)}")
    draft.resolved()
    label_notes = notes(columns, shape, "task.label" in request.given)
    check_notes = [note for note in checked.notes if not (about_rows and _WHERE in note)]  # the rows are counted above
    if others_fit:
        lines.append(f"note      the columns also fit {listed(others_fit, _MOST_COLUMNS)}")
    lines += [f"note      {note}" for note in (*label_notes, *check_notes)]
    lines += [f"unchecked {part}" for part in checked.local.unchecked]
    return Proposal(draft.text(), tuple(lines), tuple(checked.problems.messages))


def _classes(draft: Draft, columns: Sequence[Column]) -> Sequence[object]:
    """Return the classes of the data; empty if the task has none."""
    section = task_sections().get(str(draft.get("task.type")))
    if section is None or "labels" not in section.model_fields:
        return ()
    label = next((column for column in columns if column.name == draft.get("task.label")), None)
    return draft.get("task.labels") or ([] if label is None else label.names or label.distinct)


def _data_lines(draft: Draft, columns: Sequence[Column], number: int, is_whole: bool) -> Iterator[str]:
    shown = f"{number:,}" if is_whole else f"more than {number:,}"
    yield f"data      {shown} rows of {listed([column.shown for column in columns], _MOST_COLUMNS)}"
    for key, value in draft.values["data"].items():
        if why := draft.comments.get(f"data.{key}"):
            yield f"read      {key} {value}: {why}"
    repeated = [column.name for column in columns if column.name in column.distinct]
    if repeated and _has_header(draft.request.source):
        yield (
            f"note      the first line gives the columns their names, but `{repeated[0]}` is also a value there; if"
            " that line is a row, add a line of names"
        )


def _put_where(draft: Draft, conditions: Sequence[str], why: str, number: int) -> tuple[int, list[str]]:
    """Leave out rows without values; return their number and a line on them."""
    if conditions and not _may_map(draft.request):
        return 0, [f"note      {json.dumps(conditions, ensure_ascii=False)} in `data.map.where` {why}"]
    if conditions:
        _put_map(draft, "where", conditions, why)
    return number, [f"rows      {why}"] if conditions else []


def _with_classes(shape: Shape, columns: Sequence[Column], draft: Draft) -> tuple[Shape, Sequence[Column]]:
    """Return task and columns with the classes that are read: a column of 1e5 and +1 holds numbers, or their names."""
    label = next((column for column in columns if column.name == shape.task.get("label")), None)
    is_typed = _has_header(draft.request.source) and _has_one_label(shape)
    names_classes = is_typed and "labels" in task_sections()[shape.type].model_fields
    if not names_classes or label is None or label.kind == "text" or shape.columns is not None:
        return shape, columns
    again = {column.name: column for column in columns_of(read(draft, {label.name: "class"}).train, MOST_ROWS)}
    found = shapes(list(again.values()), {key: shape.task[key] for key in ("text", "label")})
    made = next((replace(one, labels=shape.labels) for one in found if one.type == shape.type), shape)
    return made, [again[label.name] if column is label else column for column in columns]


def _shape(
    columns: Sequence[Column], request: InitRequest, ask: Ask, own_notes: Sequence[str]
) -> tuple[Shape, list[str]]:
    """Return the task of the columns, and others that read these too, beside a text; ask if several fit.

    Raises:
        UsageError: none fits.
    """
    _require_columns(columns, request)
    found: dict[str, Shape] = {}  # the likeliest of each type
    for shape in shapes(columns, request.given_columns):
        if shape.columns is None or _may_map(request):
            found.setdefault(shape.type, shape)
    if (kind := request.given.get("task.type")) is not None:
        return found.get(kind) or _given_type(kind, columns, list(found.values()), request), []
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
    _require_classes(columns, next(iter(found.values())), request)
    kinds = list(found)
    shape = found[ask("task", kinds[0], kinds) if len(kinds) > 1 else kinds[0]]
    read = {column.name for column in names_read(columns, shape)}
    alike = [one for one in found.values() if read <= {column.name for column in names_read(columns, one)}]
    others = [f"task.type={one.type}" for one in alike if one is not shape and min(len(one.task), len(shape.task)) > 2]
    if _has_one_label(shape) and len(columns) > 2:
        shape = _with_columns(shape, columns, request, ask)
    return shape, others


def _require_classes(columns: Sequence[Column], shape: Shape, request: InitRequest) -> None:
    """Refuse a label that teaches nothing.

    Raises:
        UsageError: it does not.
    """
    if problem := unlearnable(columns, shape):
        raise UsageError(
            f"`{request.source}` has no label to learn: {problem}; correct it, name another column in"
            " task.label=COLUMN, or learn the texts alone by task.type=causal_lm"
        )


def _given_type(kind: str, columns: Sequence[Column], found: Sequence[Shape], request: InitRequest) -> Shape:
    """Return a given task that no rule proposes, with the text and the label of another one if it reads such."""
    section = task_sections().get(kind)
    if section is not None and {"text", "label"} <= section.model_fields.keys() and found:
        if other := next(filter(_has_one_label, found), None):
            keys = {key: other.task[key] for key in ("text", "label")}
            return replace(other, task={"type": kind, **keys}, why="as given")
        _require_classes(columns, found[0], request)
    return Shape({"type": kind}, "as given")


def _may_map(request: InitRequest) -> bool:
    """Return whether `data.map` exists, and the user gives none of it."""
    return "map" in FileData.model_fields and not any(key.startswith("data.map") for key in request.given)


def _require_columns(columns: Sequence[Column], request: InitRequest) -> None:
    """Refuse a text or a label of the user that no column has.

    Raises:
        UsageError: there is such a name.
    """
    names = [column.name for column in columns]
    for key, given in request.given_columns.items():
        for name in given if isinstance(given, list) else [given]:
            if name not in names and _may_map(request):
                raise UsageError(
                    f"`task.{key}` must name a column of `{request.source}`, but is {name}; its columns are"
                    f" {listed(names, _MOST_COLUMNS)}"
                )


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


def _put_map(draft: Draft, key: str, value: Any, comment: str) -> None:
    """Set a key of `data.map`, of which the user gives none."""
    draft.values["data"].setdefault("map", {})[key] = value
    draft.comments[f"data.map.{key}"] = comment


def _put_task(draft: Draft, shape: Shape) -> str:
    if shape.columns is not None:
        _put_map(draft, "columns", shape.columns, "those of the task, made from those of the data")
    for key, value in shape.task.items():
        draft.put(f"task.{key}", value)
    draft.comments["task.type"] = shape.why  # also of a given type, by which the columns are chosen
    return f"{shape.type}: {shape.why}"


def _put_model(draft: Draft, kind: str, ask: Ask) -> str:
    request = draft.request
    start = task_sections()[kind].start if kind in task_sections() else Start()
    name, why = request.model, ""
    if name is None and not any(key.startswith("model.") for key in request.given):
        name, why = _asked_model(draft, start, ask)
    draft.put("schedule.warmup", 0.1, "the share of the steps in which the learning rate rises")
    if name != SAMPLE:
        if name is not None:
            model, recipe = Path(name).expanduser(), Path(os.path.abspath(request.output))
            draft.put("model.name_or_path", folder_name(model, recipe.parent) if model.is_dir() else name, why)
        draft.put("training.epochs", 3)
        rate, reason = learning_rate(draft, start, name)
        draft.put("optimizer.learning_rate", rate, reason)
        named = name or draft.get("model.name_or_path") or "random weights"
        return f"{named}: {why or 'as given'}, with the learning rate {draft.get('optimizer.learning_rate'):g}"
    if tools := draft.values.get("task", {}).pop("tools", None):
        draft.comments["task.messages"] = f"the sample writes no tools; with a pretrained model add tools: {tools}"
    sample = load_recipe(start.sample).recipe
    draft.comments["model"] = f"small, random weights; for pretrained ones: name_or_path: {start.model}"
    draft.put("model.config", sample.model.config)
    if sample.model.tokenizer:
        draft.put("model.tokenizer", sample.model.tokenizer)
    draft.put("training.epochs", sample.training.epochs, "pretrained: 3")
    draft.put("optimizer.learning_rate", sample.optimizer.learning_rate, f"pretrained: {start.learning_rate:g}")
    return f"{SAMPLE}: small, random weights{why and f', since {why}'}; pretrained: --model {start.model}"


def _asked_model(draft: Draft, start: Start, ask: Ask) -> tuple[str, str]:
    """Return the model that the user chooses, and the reason if it is the proposed one."""
    found = proposed_model(draft, start, (draft.request.gpus or devices_here()).upper() != "CPU")
    name = ask(f"model ({SAMPLE}, a folder, or a name on the hub such as {start.model})", found.name)
    return name, found.why if name == found.name else ""


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
    plan, most = plan_run(draft.resolved(["training.micro_batch_size=1"]).recipe, 1), _LENGTHS[-1]
    if plan.recipe.task.other_inputs is not None:
        return None
    has_model, has_tokenizer = _is_here(draft)
    if has_model or shipped_models(plan.recipe):
        most = min(most, max_positions(load_config(shaped(plan).recipe.model, {})) or most)
    return min(most, int(load_tokenizer(plan.recipe.model).model_max_length)) if has_tokenizer else most


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
