"""Warnings on answers: prompts that are trained too, answers without tokens, without text or without an end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.base.text import listed
from trainer.data.split import EncodedSplit
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.tasks.task import Task
from trainer.tasks.types import Tokenizer

_MOST_LABELS = 5_000_000  # training labels; counting more takes time at each start
_MOST_BLANK = 8  # tokens of an empty answer: its end, blanks, and marks of an empty reasoning


def answer_notes(task: Task, split: EncodedSplit, tokenizer: Tokenizer | None) -> list[str]:
    """Return warnings on the answers of a training split.

    They are on answers that are trained wholly with their prompts, or not at all; on empty answers; and on a missing
    end.
    """
    notes: list[str] = []
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
