"""A description of what a model will see: tokens with marks, labels, lengths, and the types of its parameters.

It comes from the encoded rows and from microbatches as a run collates them, so it shows the truth of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from torch import Tensor

from trainer.data.loader import TrainLoader
from trainer.data.order import IndexArray
from trainer.data.split import EncodedSplit
from trainer.observe.preview_records import Piece, Preview, ShownClass, ShownRow, ShownSplit, ShownText
from trainer.parallel.microbatch import IGNORED_LABEL, Microbatch
from trainer.recipe.plan import RunPlan
from trainer.tasks.preview import ShownToken, has_token_labels
from trainer.tasks.task import TextTask
from trainer.training.assembly import Assembly
from trainer.training.data_notes import class_counts
from trainer.training.run_data import PreparedData
from trainer.training.run_tool import RunTool

_ROWS_SHOWN = 3  # of the first microbatch, in the report of a run
_MOST_COUNTED = 20_000_000  # tokens of a split
_BINS = 10


class FirstRows(RunTool):
    """The preview of the first step, for the report of a run."""

    def preview(self, parts: Assembly) -> Preview | None:
        if parts.mesh.rank or parts.progress.step:
            return None
        return step_of_run(parts.plan, parts.data, parts.train_loader, _ROWS_SHOWN)


def step_of_run(plan: RunPlan, data: PreparedData, loader: TrainLoader | None, most: int) -> Preview:
    """Describe the first rows of the first microbatch of a rank in step 1, the splits and the classes.

    Without a loader, it has no microbatch.
    """
    rows: Iterable[ShownRow] = ()
    if loader is not None:
        microbatch, ids = loader.batch(0).microbatches[0], loader.row_ids(0)
        places = [] if microbatch.filler else microbatch.rows.tolist()
        rows = rows_of_microbatch(microbatch, [ids[place] for place in places[:most]], data, data.train)
    length, weights = plan.recipe.data.max_length, getattr(data.task, "class_weights", None) or {}
    classes = class_counts(data.task, data.train)  # of a task with one class for each row
    return Preview(
        name=plan.recipe.name,
        task=plan.recipe.task.type,
        step=tuple(rows),
        splits=tuple(_shown_split(name, split, data, length) for name, split in data.splits.items()),
        classes=tuple(ShownClass(name, number, weights.get(name, 1.0)) for name, number in classes),
    )


def _shown_split(name: str, split: EncodedSplit, data: PreparedData, max_length: int) -> ShownSplit:
    """Describe a split; `max_length` is that of the recipe."""
    lengths = split.lengths if split.tokens else np.zeros(0, int)
    longest = int(lengths.max(initial=0))
    trained = None
    if data.masking is None and isinstance(data.task, TextTask):
        labels = split.tokens.get("labels")
        if labels is not None:
            trained = float((np.asarray(labels[:_MOST_COUNTED]) != IGNORED_LABEL).mean()) if len(labels) else 0.0
    return ShownSplit(name, len(split), split.num_cut, max_length, longest, lengths_histogram(lengths), trained)


def lengths_histogram(lengths: IndexArray) -> tuple[tuple[int, int], ...]:
    """Return the upper ends of some ranges of lengths, and the number of lengths in each."""
    longest = int(lengths.max(initial=0))
    if not longest:
        return ()
    edges = np.unique(np.linspace(0, longest, _BINS + 1).round().astype(int))
    # The ranges of numpy have no upper end, but the last one.
    counts = np.histogram(lengths - 0.5, edges)[0]
    return tuple((int(edge), int(count)) for edge, count in zip(edges[1:], counts, strict=True))


def rows_of_microbatch(
    batch: Microbatch, rows: Sequence[int], data: PreparedData, split: EncodedSplit
) -> Iterator[ShownRow]:
    """Yield the rows of a microbatch; `rows` are their indices in the split."""
    inputs, preview = batch.inputs, data.task.preview
    for place, row in enumerate(rows):
        own = {name: tensor[place] for name, tensor in inputs.items()}
        labels = batch.labels[place]
        label = preview.label(labels, own)
        if "input_ids" not in own:
            size = " x ".join(map(str, next(iter(own.values())).shape))
            yield ShownRow(row, label, (ShownText(preview.role(0), 0, (Piece("input", size),)),))
            continue
        texts = list(_texts(own, labels, data))
        if "decoder_input_ids" in own:
            texts.append(_target(labels, data))
        yield ShownRow(row, label, tuple(texts), preview.window(split, row))


def _texts(inputs: Mapping[str, Tensor], labels: Tensor, data: PreparedData) -> Iterator[ShownText]:
    """Yield the texts of a row from its inputs `[tokens]` or `[texts, tokens]`."""
    preview, by_token = data.task.preview, has_token_labels(labels, inputs)
    if inputs["input_ids"].dim() == 1:
        yield _text("text", inputs, by_token, labels, data)
        return
    for number in range(len(inputs["input_ids"])):
        part = {name: one[number] if one.dim() > 1 else one for name, one in inputs.items()}
        is_trained = preview.num_trained is None or number < preview.num_trained
        role = "text" if len(inputs["input_ids"]) == 1 else preview.role(number)
        yield _text(role, part, by_token and is_trained, labels[number] if by_token else labels, data)


def _text(role: str, inputs: Mapping[str, Tensor], by_token: bool, labels: Tensor, data: PreparedData) -> ShownText:
    """Describe a text; `labels` are those of its tokens, or of its row."""
    number, preview = int(inputs["attention_mask"].sum()), data.task.preview
    ids = inputs["input_ids"][:number].tolist()
    if by_token:
        tokens = preview.labelled(ids, labels[:number].tolist(), inputs)
    else:
        tokens = preview.tokens(ids, labels, inputs)
    pieces = list(_pieces(tokens, data))
    if padding := len(inputs["input_ids"]) - number:
        pieces.append(Piece("padding", f"{padding} token{'s' * (padding != 1)} of padding"))
    return ShownText(role, number, tuple(pieces))


def _target(labels: Tensor, data: PreparedData) -> ShownText:
    known = labels[labels != IGNORED_LABEL]
    pieces = [Piece("trained", decoded(data, known.tolist()))]
    if padding := len(labels) - len(known):
        pieces.append(Piece("padding", f"{padding} token{'s' * (padding != 1)} of padding"))
    return ShownText("target", len(known), tuple(pieces))


def _pieces(tokens: Sequence[ShownToken], data: PreparedData) -> Iterator[Piece]:
    done: list[int] = []
    before = ""
    for (mark, note, _), group in groupby(tokens, key=lambda one: (one.mark, one.note, one.group)):
        own = [one.token for one in group]
        done += own
        whole = decoded(data, done)  # spaces and characters depend on the tokens before
        yield Piece(mark, whole[len(before) :] if whole.startswith(before) else decoded(data, own), note)
        before = whole


def decoded(data: PreparedData, ids: Any) -> str:
    tokenizer: Any = data.preparation.text_tokenizer
    return str(tokenizer.decode(list(map(int, ids)), clean_up_tokenization_spaces=False))
