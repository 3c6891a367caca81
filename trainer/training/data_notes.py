"""Notes for the user on the data of a run: rows that were cut, joined or repeated, classes, and unknown tokens."""

from __future__ import annotations

import itertools
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.base.text import LITERAL, listed, number_in
from trainer.data.split import EncodedSplit
from trainer.models.configuration import rotary_positions
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.recipe.schema import FileData, Recipe
from trainer.tasks.classes import plain_name
from trainer.tasks.task import Task
from trainer.tasks.text.tied_texts import MOST_COMPARED, texts_of
from trainer.tasks.types import Tokenizer
from trainer.training.row_source import Shares

_MOST_LABELS = 5_000_000  # training labels; counting more takes time at each start
_USUAL_SHARE = 0.01  # of the rows
_MOST_BLANK = 8  # tokens of an empty answer: its end, blanks, and marks of an empty reasoning

SplitsByName = Mapping[str, EncodedSplit]
"""`training`, and `validation` if there is one."""


def encoding_notes(splits: SplitsByName, max_length: int, unit: str, cut_targets: str) -> list[str]:
    """Return notes on rows cut to `max_length` tokens, targets that are cut, rows without text, and unknown tokens.

    Args:
        unit: the name of encoded rows; see `row_unit`.
        cut_targets: the text of the task about targets that are cut.
    """
    cut, targets, blank, unknown = [], [], [], []
    for name, split in splits.items():
        rows = f"of {len(split):,} {name} {unit}"
        if split.num_cut:
            cut.append(f"truncated to `data.max_length` ({max_length} tokens): {split.num_cut:,} {rows}")
        if split.num_cut_targets:
            targets.append(f"{cut_targets}: {split.num_cut_targets:,} {rows}")
        if split.num_blank:
            blank.append(f"special tokens only: {split.num_blank:,} {rows}, which have no text")
        if split.unknown_tokens is not None:
            number, tokens = split.unknown_tokens
            share = number / max(tokens, 1)
            unknown.append(f"unknown to the tokenizer: {share:.2%} of {tokens:,} {name} tokens")
    return [*cut, *targets, *blank, *unknown]


def trained_notes(task: Task, split: EncodedSplit, tokenizer: Tokenizer | None) -> list[str]:
    """Return warnings on a training split that teaches too little.

    They are on answers that are trained wholly with their prompts, or not at all; on empty answers, and equal ones of a
    pair; on a missing end; and on most rows being cut.
    """
    notes = task.answer_notes(split)
    if 2 * split.num_cut > len(split):
        notes.append(f"most training rows are truncated: {split.num_cut:,} of {len(split):,}; raise `data.max_length`")
    if not task.labels_are_tokens or task.trains_all_tokens:
        return notes
    column = split.ragged.get("labels")
    labels = split.tokens.get("labels") if column is None else column.values
    if labels is None or not len(labels) or tokenizer is None:
        return notes  # random tokens are hidden
    # The first labels stand for all; a note needs no exact count.
    labels = labels[:_MOST_LABELS]
    is_trained = labels != IGNORED_LABEL
    if not is_trained.any():
        notes.append("no token of the training rows is trained: `data.max_length` cuts all answers")
        return notes
    if column is None:
        if is_trained.all():
            notes.append("all tokens of the training rows are trained, those of prompts too")
        # Rows that begin inside of the counted labels.
        starts = split.offsets[:-1][split.offsets[:-1] < len(labels)]
        if empty := int((np.add.reduceat(is_trained, starts, dtype=int) == 0).sum()):
            notes.append(f"no token is trained in {empty:,} of {len(starts):,} training texts: their answers are cut")
        empty, number = _num_empty(labels, is_trained, tokenizer)
        if empty:
            notes.append(f"{empty:,} of {number:,} trained answers are empty, so the model learns to answer nothing")
    return [*notes, *_end_notes(labels, task.end_tokens(tokenizer), tokenizer)]


def _end_notes(labels: NDArray[Any], ends: Sequence[int], tokenizer: Tokenizer) -> Iterator[str]:
    is_end = np.isin(labels, ends)
    names = listed([repr(tokenizer.decode([end])) for end in ends], 3)
    if ends and not is_end.any():
        yield f"no end token ({names}) is trained, so the model does not learn to end an answer"
    if doubled := int((is_end[1:] & (labels[1:] == labels[:-1])).sum()):
        yield f"{doubled:,} trained answers have two end tokens ({names}); remove those in their texts"


def _num_empty(labels: NDArray[Any], is_trained: NDArray[np.bool_], tokenizer: Tokenizer) -> tuple[int, int]:
    """Return the number of trained answers without text, and the number of answers.

    Args:
        labels: the label of each token, of shape `[tokens]`; `is_trained` is of the same shape.
    """
    # Runs of trained tokens: edges alternate between the first token and the one after the last.
    edges = np.flatnonzero(np.diff(is_trained, prepend=False, append=False)).reshape(-1, 2)
    short = [labels[start:end].tolist() for start, end in edges if end - start <= _MOST_BLANK]
    added = tokenizer.added_tokens_decoder
    blank = {token for token in set(itertools.chain(*short)) if token in added or not tokenizer.decode([token]).strip()}
    return sum(blank.issuperset(answer) for answer in short), len(edges)


def row_unit(recipe: Recipe, task: Task, splits: SplitsByName, source_rows: Mapping[str, int]) -> str:
    """Return the name of encoded rows, which differ from those of the source if a split has another number of them."""
    if all(source_rows[name] == len(split) for name, split in splits.items()):
        return "rows"
    return "packed rows" if task.packer(recipe.data.max_length) else "windows"


def row_notes(recipe: Recipe, unit: str, splits: SplitsByName, source_rows: Mapping[str, int]) -> list[str]:
    """Return notes on splits with another number of rows than their sources, and on too few rows for a batch.

    `unit` is the result of `row_unit`.
    """
    length, size = recipe.data.max_length, recipe.training.global_batch_size
    notes = []
    if size > (rows := len(splits["training"])):
        notes.append(f"`training.global_batch_size` is {size}, but a step has at most the {rows:,} rows of an epoch")
    return notes + [
        f"{source_rows[name]:,} {name} rows became {len(split):,} {unit} of at most {length} tokens"
        for name, split in splits.items()
        if source_rows[name] != len(split)
    ]


def position_notes(config: Any, splits: SplitsByName) -> list[str]:
    """Return a note on each split with later positions than those of a model with rotary positions."""
    positions = rotary_positions(config)
    notes = []
    for name, split in splits.items():
        if positions is None or not len(split):
            continue
        own = split.tokens.get("position_ids")  # of packed documents
        longest = int(split.lengths.max()) if own is None else int(own.max()) + 1
        if longest > positions:
            notes.append(
                f"{name} rows have up to {longest} tokens, more than the {positions} positions of the model"
                " (`max_position_embeddings`), beyond which its quality suffers; lower `data.max_length`, or scale the"
                " positions by `model.config.rope_parameters`"
            )
    return notes


def mixture_notes(recipe: Recipe, mixture: Shares | None) -> list[str]:
    """Return a note on the share of each source in an epoch, or on a check that does not count the rows of sources."""
    if recipe.data.source_weights is None:
        return []
    if mixture is None:
        return [
            "mixture: this check read only a part of the rows, so the run finds weights that are too small at its start"
        ]
    assert isinstance(recipe.data, FileData)
    return [
        f"mixture: {count:,} of the {mixture.num_rows:,} rows of an epoch are of `{entry}`, which has {size:,}:"
        f" {count / size:.2f} passes"
        for entry, count, size in zip(recipe.data.train, mixture.counts, mixture.sizes, strict=True)
    ]


def class_counts(task: Task, split: EncodedSplit) -> tuple[tuple[str, int], ...]:
    """Return the name of each class and its number of rows; empty if rows have no single class."""
    names = task.model_options().get("id2label")
    if names is None or "labels" not in split.scalars:
        return ()
    counts = np.bincount(split.scalars["labels"], minlength=len(names))
    return tuple((str(names[index]), int(count)) for index, count in enumerate(counts))


def class_notes(task: Task, train: EncodedSplit, validation: EncodedSplit | None) -> list[str]:
    """Return warnings on classes that look like one or lack rows, and on rows that are there more than once."""
    counts = class_counts(task, train)
    notes = []
    if absent := [name for name, count in counts if not count]:
        notes.append(f"no training row has the class {_shown(absent)}, so it is never predicted well")
    notes += _name_notes([name for name, _ in counts])
    if single := [name for name, count in counts if count == 1]:
        kind = f"classes {_shown(single)} have" if len(single) > 1 else f"class {single[0]!r} has"
        notes.append(f"the {kind} one training row; a typo in a label creates such a class")
    return notes if validation is None else notes + _validation_notes(task, train, validation, dict(counts))


def _validation_notes(
    task: Task, train: EncodedSplit, validation: EncodedSplit, counts: Mapping[str, int]
) -> list[str]:
    if train.content_hash == validation.content_hash:
        return ["the validation split holds the rows of the training split, so metrics do not show new rows"]
    notes = []
    held = dict(class_counts(task, validation))
    if absent := [name for name, count in counts.items() if count and not held[name]]:
        notes.append(f"the validation split has no row of {_shown(absent)}")
    if not counts and "labels" in validation.scalars and np.ptp(validation.scalars["labels"]) == 0:
        value = validation.scalars["labels"].flat[0]
        notes.append(f"all validation labels are {value:g}, so correlations are undefined, and shown as 0")
    return notes + _repetitions(train, validation)


def _shown(names: Sequence[str]) -> str:
    return listed(list(map(repr, names)), 3)


def _name_notes(names: Sequence[str]) -> Iterator[str]:
    """Yield notes on names of classes that differ in their form only, or that are a list of classes."""
    alike: dict[str, list[str]] = {}
    numbers, words = list[str](), list[str]()
    for name in names:
        alike.setdefault(plain_name(name), []).append(name)
        (words if number_in(name) is None else numbers).append(name)
    for group in alike.values():
        if len(group) > 1:
            # Names that look the same need their code points.
            look_alike = len({unicodedata.normalize("NFKC", name) for name in group}) < len(group)
            shown = " and ".join(map(ascii if look_alike else repr, group))
            fix = "if they are one class, fix the labels"
            yield f"the classes {shown} differ only in case, space or form of Unicode; {fix}"
    if len(numbers) > 1 and len(words) > 1:
        yield (
            f"the classes {_shown(numbers)} are numbers, and {_shown(words)} are words; if they are the same classes in"
            " other files, change one kind by `values` of `data.map.columns`"
        )
    if joined := _joined(names):
        yield (
            f"the class {joined!r} looks like a list of classes in one text; for several labels a row, write lists as"
            " JSON Lines or Parquet, and set `task.multi_label`"
        )


def _joined(names: Sequence[str]) -> str | None:
    """Return the first name that is a list as text, or joins names by a mark, most of which are in other names too."""
    # A list that was written as text, such as "['a', 'b']".
    if written := next(filter(LITERAL.fullmatch, names), None):
        return written
    for mark in "|;,":
        parts = {name: {part.strip() for part in name.split(mark)} for name in names}
        uses = Counter(part for inner in parts.values() for part in inner)
        joined = [name for name, inner in parts.items() if len(inner) > 1]
        shared = sum(all(uses[part] > 1 for part in parts[name]) for name in joined)
        # Most parts must be classes elsewhere too, or names with a comma would be taken for lists.
        if shared and 2 * shared >= len(joined):
            return joined[0]
    return None


def _repetitions(train: EncodedSplit, validation: EncodedSplit) -> list[str]:
    """Return notes on validation rows that are training rows, and on equal training rows with different labels.

    Rows are compared by their tokens. Small numbers of such rows are usual, and not noted.
    """
    labels = train.scalars.get("labels")
    if labels is None or labels.ndim != 1 or len(train) > MOST_COMPARED or "input_ids" not in train.tokens:
        return []
    found: dict[bytes, Any] = {}
    differing = 0
    for text, label in zip(_texts_of(train), labels.tolist(), strict=True):
        differing += found.setdefault(text, label) != label
    known = sum(text in found for text in _texts_of(validation))
    notes = []
    if differing > _USUAL_SHARE * len(train):
        notes.append(f"{differing:,} of {len(train):,} training rows have the tokens of another row with another label")
    if known > _USUAL_SHARE * len(validation):
        notes.append(f"{known:,} of {len(validation):,} validation rows have the tokens of a training row")
    return notes


def _texts_of(split: EncodedSplit) -> Iterator[bytes]:
    """Yield the tokens of each row."""
    return texts_of(split, split.texts_per_row)
