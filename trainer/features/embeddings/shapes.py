"""The columns of embeddings, for `trainer init`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from trainer.features import Columns

_TEXTS = (("anchor", "positive"), ("query", "positive"), ("question", "positive"))
_UNSCORED = (("query", "document"), ("query", "passage"))
"""Columns of the same, unless a column may score them."""
_NEGATIVE = re.compile(r"(hard_?)?neg(ative)?_?\d*", re.IGNORECASE)
"""The columns of hard negatives, such as those that `trainer mine` writes."""
_PAIRS = (
    ("sentence1", "sentence2"), ("text1", "text2"), ("question1", "question2"), ("text_a", "text_b"),
    ("query", "document"), ("query", "passage"), ("question", "answer"), ("premise", "hypothesis"),
)  # fmt: skip
_KINDS = ("embedding", "sparse_embedding", "multi_vector_embedding")
"""The tasks that read the same columns, the usual one first."""


def of_embeddings(columns: Columns) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the sections `task` of a query and its documents, and the reason for each."""
    texts = _related(columns)
    read = texts or [column.name for column in columns.texts]
    if score := _scores(columns, len(read) - 1):
        keys = {"score": score, "loss": "margin_mse"}
        yield from _of_each_kind(read, f"a query and documents, with the scores of a teacher in `{score}`", **keys)
    elif texts:
        yield from _of_each_kind(texts, "texts that belong together")


def _related(columns: Columns) -> list[str]:
    """Return the columns of texts that belong together, with their negatives; none if there are not two of them."""
    texts = next((found for names in _TEXTS if (found := columns.every(("text",), *names))), [])
    negatives = [one.name for one in columns.all if one.kind == "text" and _NEGATIVE.fullmatch(one.name)]
    if negatives and not texts:  # query and positive have any names
        texts = [one.name for one in columns.all if one.kind == "text" and one.name not in negatives][:2]
    if not texts:
        pairs = (columns.every(("text",), *names) for names in _UNSCORED)
        texts = next((found for found in pairs if found and not columns.labels(found)), [])
    return [*texts, *negatives] if len(texts) == 2 else []


def _scores(columns: Columns, number: int) -> str | None:
    """Return the column of lists with so many numbers, at least two."""
    if number < 2:
        return None
    lists = (column for column in columns.all if column.kind == "numbers")
    return next((one.name for one in lists if all(len(value) == number for value in one.values)), None)


def _of_each_kind(texts: list[str], why: str, **keys: Any) -> Iterator[tuple[dict[str, Any], str]]:
    for kind in _KINDS:
        yield {"type": kind, "texts": texts, **keys}, why


def of_pairs(columns: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the sections `task` of any two texts, with their score if there is one, and the reason for each."""
    named: list[str] = next((texts for names in _PAIRS if (texts := columns.every(("text",), *names))), [])
    texts = named or [column.name for column in columns.texts if column is not columns.label][:2]
    if len(texts) < 2:
        return
    scores = [column for column in columns.labels(texts) if column.kind in ("integer", "number")]
    if scores and scores[0].mapped is None:
        keys = {"score": scores[0].name, "loss": "cosent", "metrics": ["spearman"]}
        yield {"type": "embedding", "texts": texts, **keys}, f"two texts, and their similarity in `{keys['score']}`"
    else:
        yield from _of_each_kind(texts, "two texts that belong together")
