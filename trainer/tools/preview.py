"""The work of `trainer preview`: what a model will see, before a step.

It needs the data, the tokenizer and the model's configuration, but no weights and no GPU.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from rich.text import Text
from torch import nn

from trainer.base.errors import UsageError
from trainer.base.text import aligned, for_terminal, listed, one_line
from trainer.data.collate import collate
from trainer.data.split import EncodedSplit
from trainer.engine.products import rounded_by_autocast
from trainer.models.describe import ModelDescription
from trainer.models.registered_forms import form_of
from trainer.observe.preview_records import Piece, Preview, ShownClass, ShownRow
from trainer.observe.summary import bar_text
from trainer.parallel.stored_in_parts import sizes_of_parts
from trainer.recipe.plan import RunPlan
from trainer.recipe.registered import asked_for
from trainer.tools.preview_rows import decoded, lengths_histogram, rows_of_microbatch, step_of_run
from trainer.tools.report.page import Section, render
from trainer.tools.report.preview_blocks import preview_blocks, split_table
from trainer.tools.writing import write_over
from trainer.training.assembly import batches_of
from trainer.training.describing import describe_model
from trainer.training.row_encoding import TextPreparation
from trainer.training.run_data import PreparedData, UnknownClassesError, prepare_data

_MOST_ROWS = 20_000  # of each split; more would be encoded for minutes
_MOST_UNCUT = 1_000  # rows that are encoded without a maximum length
_NO_LIMIT = 10**6  # tokens
_STYLES = {"trained": "green", "masked": "magenta", "input": "", "padding": "dim", "cut": "red"}
_MOST_LINES = 25
_KEPT = 200  # characters at either end of a text that is shortened
_CLASSES_SHOWN = 20
_LATER_LINE = "\n  | "
"""The start of each later line of a text, which could look like one of the program."""
_SIGNS = {"trained": ("[", "]"), "masked": ("<", ">"), "input": ("", ""), "padding": ("(", ")"), "cut": ("{cut: ", "}")}


def preview_recipe(plan: RunPlan, rows: int = 3, split: str = "training", data_rank: int = 0) -> Preview:
    """Return the preview of a recipe.

    Args:
        plan: the recipe and its layout.
        rows: the rows to show of the split, and at most of the microbatch.
        split: `training` or `validation`.
        data_rank: the data-parallel rank of the microbatch.

    Raises:
        TrainerError: the data cannot be prepared, there is no such split, or the model cannot be described.
    """
    recipe = plan.recipe
    try:
        data = prepare_data(recipe, _MOST_ROWS)
    except UnknownClassesError:  # the first rows lack some classes
        data = prepare_data(recipe)
    if split not in data.splits:
        raise UsageError(f"`--split` is {split}, but the recipe has {' and '.join(data.splits)}; select one of these")
    shown = data.splits[split]
    if data_rank >= plan.batch.data_parallel_size:
        raise UsageError(
            f"`--rank` must be below the data-parallel size {plan.batch.data_parallel_size}, but is {data_rank}"
        )
    loader = batches_of(plan, data, data_rank) if data.is_whole else None
    preview = step_of_run(plan, data, loader, rows)
    uncut = _uncut(plan, data) if shown.num_cut else None
    longer = None if uncut is None else uncut.splits[split]
    splits = [
        replace(one, uncut=lengths_histogram(uncut.splits[one.name].lengths)) if uncut is not None and one.cut else one
        for one in preview.splits
    ]
    first = range(min(rows, len(shown), len(longer) if longer is not None else len(shown)))
    return replace(
        preview,
        rows=shown_rows(shown, data, first, longer),
        splits=tuple(splits),
        kinds=kinds(plan, describe_model(recipe, data.task)),
        notes=tuple(data.notes(recipe.data.max_length)),
    )


def _uncut(plan: RunPlan, data: PreparedData) -> PreparedData | None:
    """Return the first rows without a maximum length; None if they are not of texts, or not the same rows."""
    if not isinstance(data.preparation, TextPreparation) or data.unit != "rows":
        return None
    # A copy, because the preparation itself must go on to cut texts.
    tokenizer = copy(data.preparation.tokenizer)
    tokenizer.model_max_length = _NO_LIMIT
    whole = replace(data.preparation, tokenizer=tokenizer, max_length=_NO_LIMIT)
    with tempfile.TemporaryDirectory(prefix="trainer-") as cache:
        found = prepare_data(plan.recipe, _MOST_UNCUT, Path(cache), lambda _: whole)
        return found  # the open files of the cache can be read after it is deleted


def shown_rows(
    split: EncodedSplit, data: PreparedData, rows: Sequence[int], uncut: EncodedSplit | None = None
) -> tuple[ShownRow, ...]:
    """Describe rows of a split, each without padding; `uncut` holds the same rows without a maximum length."""
    found = []
    for row in rows:
        ids = np.array([row])
        batch = collate(split, ids, data.preparation.batching, ids, masking=data.masking, epoch=0)
        (shown,) = rows_of_microbatch(batch, [row], data, split)
        found.append(_with_rest(shown, split, uncut, data) if uncut is not None else shown)
    return tuple(found)


def _with_rest(shown: ShownRow, split: EncodedSplit, uncut: EncodedSplit, data: PreparedData) -> ShownRow:
    """Return a row with a piece for the tokens that each text lost."""
    texts = []
    for number, text in enumerate(shown.texts):
        if number >= split.texts_per_row:
            texts.append(text)
            continue
        place = shown.row * split.texts_per_row + number
        own, whole = (int(one.offsets[place + 1] - one.offsets[place]) for one in (split, uncut))
        if whole > own:
            start = int(uncut.offsets[place]) + own
            rest = decoded(data, uncut.tokens["input_ids"][start : int(uncut.offsets[place + 1])])
            text = replace(text, pieces=(*text.pieces, Piece("cut", rest, f"{whole - own} tokens")))
        texts.append(text)
    return replace(shown, texts=tuple(texts))


def kinds(plan: RunPlan, description: ModelDescription) -> tuple[tuple[str, ...], ...]:
    """Return a table of the kinds of parameters: a header, then trained and frozen ones with their types.

    Raises:
        UsageError: the model cannot be built on `meta`.
    """
    recipe = plan.recipe
    model = description.on_meta()
    description.adapt(model)
    updates = asked_for("update", recipe)
    masters = [update.masters(recipe) for update in updates if update.weights_dtype == torch.bfloat16]
    counted = _numbers(plan, model, "bf16" if masters else "fp32")
    rows = [("parameters", "number", "weights", "products", "master", "gradients", "optimizer state", "traffic")]
    sent = recipe.parallel.communication.gradients if plan.layout.world_size > 1 else "none"
    state = recipe.optimizer.state_type
    for (is_trained, held), number in sorted(counted.items(), key=lambda one: (not one[0][0], one[0][1])):
        shown = (f"{number:,}", held, recipe.precision)
        if is_trained:
            kept = f"fp32, of {plan.strategy.package}" if plan.strategy.package else "the weights"
            kept = masters[0] if held == "bf16" else kept
            rows.append(("trained", *shown, kept, "fp32", f"{recipe.optimizer.name}, {state}", sent))
        else:
            rows.append(("frozen", *shown, "", "", "", ""))
    return tuple(rows)


def _numbers(plan: RunPlan, model: nn.Module, narrow: str) -> Counter[tuple[bool, str]]:
    """Count trained and frozen parameters by the type that holds them; `narrow` is that of trained matrices."""
    recipe, counted = plan.recipe, Counter[tuple[bool, str]]()
    rounded, whole, form = rounded_by_autocast(model), sizes_of_parts([model]), form_of(recipe.model)
    for name, parameter in model.named_parameters():
        if form is not None and name in whole:
            held = str(form.value)
        elif parameter.requires_grad:
            held = narrow if name in rounded else "fp32"
        else:  # as `store_frozen` does
            is_narrow = name in rounded and parameter.dim() > 1 and not plan.strategy.package
            held = recipe.precision if is_narrow else "fp32"
        counted[parameter.requires_grad, held] += whole.get(name, parameter.numel())
    return counted


def preview_lines(preview: Preview, brief: bool = False) -> Iterator[Text]:
    """Yield the lines of a terminal: marks have colours, and signs where there are none.

    Args:
        brief: whether to yield at most 25 lines, with long texts shortened and fewer rows if they have several texts.
    """
    signs = ", ".join(f"{before}{mark}{after}" for mark, (before, after) in _SIGNS.items() if before and mark != "cut")
    yield Text(f"{preview.name}: {preview.task}; tokens are {signs}, and {{cut: ...}}; the others are read only")
    below = list(_tables(preview))
    parts = [("the first microbatch of step 1", preview.step), ("rows of the split", preview.rows)]
    parts = [(title, rows) for title, rows in parts if rows]
    left = _MOST_LINES - 3 - len(below) - 2 * len(parts)  # also a line on texts left out, and an empty one
    texts = shown = shortened = 0
    for number, (title, rows) in enumerate(parts, start=1):
        yield Text(f"\n{title}", style="bold")
        share = max(2, left // (len(parts) - number + 1))
        lines = [_row_lines(row, brief) for row in rows]
        texts += sum(map(len, lines))
        for one in _fitting(lines, share) if brief else [line for row in lines for line in row]:
            short = _shortened(one) if brief else one
            shown, left, shortened = shown + 1, left - 1, shortened + (short is not one)
            yield short
    if shown < texts or shortened:
        yield Text(f"{texts - shown} texts are left out, and {shortened} shortened: --rows N shows N rows whole", "dim")
    yield Text("")
    yield from below


def _fitting(rows: Sequence[Sequence[Text]], most: int) -> list[Text]:
    """Return the lines of the first rows that have at most so many; of a longer first row, its first lines."""
    fitting = list(rows[0][:most])
    for row in rows[1:]:
        if len(fitting) + len(row) > most:
            break
        fitting += row
    return fitting


def _tables(preview: Preview) -> Iterator[Text]:
    """Yield the lines on splits, lengths, classes, parameters, and the notes."""
    header, table = split_table(asdict(preview)["splits"])
    yield from map(Text, aligned([header, *table]))
    for split in preview.splits:
        for name, histogram in (("", split.histogram), (" without max_length", split.uncut)):
            if any(count for _, count in histogram):
                counts = [count for _, count in histogram]
                edges, top = [0, *(edge for edge, _ in histogram)], counts.index(max(counts))
                often = f"{edges[top] + 1:,} to {edges[top + 1]:,}"
                yield Text(f"lengths of {split.name} rows{name}: {bar_text(counts)}  to {edges[-1]:,}, often {often}")
    if preview.classes:
        shown = [f"{one.name} {one.rows:,}{_weight_text(one)}" for one in preview.classes]
        yield Text(one_line(f"classes   {listed(shown, _CLASSES_SHOWN)}"))
    yield from map(Text, aligned(preview.kinds))
    for note in preview.notes:
        yield Text(one_line(f"note      {note}"))


def _weight_text(one: ShownClass) -> str:
    return "" if one.weight == 1 else f" (weight {one.weight:.4g})"


def _shortened(line: Text) -> Text:
    """Return a line, if it is long without its middle."""
    return line if len(line) <= 2 * _KEPT else Text.assemble(line[:_KEPT], (" ... ", "dim"), line[-_KEPT:])


def _row_lines(row: ShownRow, brief: bool) -> list[Text]:
    """Return a line for each text of a row; its own line breaks are escaped if it must be brief."""
    lines, later = [], "\\n" if brief else _LATER_LINE
    label = f"  label {one_line(row.label)}" if row.label else ""
    label += f"  {row.window}" if row.window else ""
    for number, text in enumerate(row.texts):
        line = Text(f"row {row.row + 1}" if number == 0 else "", style="bold")
        tokens = f", {text.tokens} tokens" if text.tokens else ""  # an image has none
        line.append(f" {text.role}{tokens}{label if number == 0 else ''}: ", style="dim")
        for piece in text.pieces:
            before, after = _SIGNS[piece.mark]
            if piece.note.startswith("document"):
                line.append(f" | {piece.note}: ", style="yellow")
            space = " " if piece.text.startswith(" ") or piece.mark in ("padding", "cut") else ""
            note = f":{piece.note}" if piece.note and not piece.note.startswith("document") else ""
            line.append(space)
            shown = for_terminal(piece.text.removeprefix(" ")).replace("\n", later)  # rich would drop some characters
            line.append(f"{before}{shown}{note}{after}", style=_STYLES[piece.mark])
        lines.append(line)
    return lines


def write_preview(preview: Preview, path: Path) -> None:
    """Write the HTML page of a preview.

    Raises:
        TrainerError: it cannot be written.
    """
    section = Section("Preview", list(preview_blocks(asdict(preview))))
    write_over(path, render(f"Preview of {preview.name}", [section]), "--output")
