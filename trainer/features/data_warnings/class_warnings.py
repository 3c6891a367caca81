"""Warnings on classes that look like one or lack rows, and on rows that are there more than once."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from trainer.base.text import LITERAL, listed, number_in
from trainer.data.split import EncodedSplit
from trainer.tasks.classes import plain_name
from trainer.tasks.task import Task
from trainer.tasks.text.tied_texts import MOST_COMPARED, texts_of
from trainer.training.data_notes import class_counts
from trainer.training.run_data import PreparedData

_USUAL_SHARE = 0.01  # of the rows


def warnings(data: PreparedData, is_part: bool) -> list[str]:
    """Return warnings on a training split that teaches too little, or that is too like the validation split.

    Args:
        is_part: whether the training split holds only its first rows, which may lack classes.
    """
    task, train = data.task, data.train
    notes = [] if is_part else class_notes(task, train, data.validation)
    if not data.preparation.counts_tokens:
        return notes
    notes += task.answer_notes(train)
    if 2 * train.num_cut > len(train):
        notes.append(f"most training rows are truncated: {train.num_cut:,} of {len(train):,}; raise `data.max_length`")
    if task.labels_are_tokens and not task.trains_all_tokens:
        from trainer.features.data_warnings.answer_warnings import answer_notes

        notes += answer_notes(task, train, data.preparation.text_tokenizer)
    return notes


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


def _shown(names: Sequence[str]) -> str:
    return listed(list(map(repr, names)), 3)
