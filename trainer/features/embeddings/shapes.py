"""The columns of embeddings, for `trainer init`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer.features import Columns

_TEXTS = (
    ("anchor", "positive", "negative"), ("query", "positive", "negative"), ("question", "positive", "negative"),
    ("anchor", "positive"), ("query", "positive"),
)  # fmt: skip
_PAIRS = (
    ("sentence1", "sentence2"), ("text1", "text2"), ("question1", "question2"), ("text_a", "text_b"),
    ("query", "document"), ("query", "passage"), ("question", "answer"), ("premise", "hypothesis"),
)  # fmt: skip


def of_embeddings(columns: Columns) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the section `task` and the reason for it."""
    for names in _TEXTS:
        if texts := columns.every(("text",), *names):
            yield {"type": "embedding", "texts": texts}, "texts that belong together"
            return


def of_pairs(columns: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the section `task` of any two texts, with their score if there is one, and the reason for it."""
    named: list[str] = next((texts for names in _PAIRS if (texts := columns.every(("text",), *names))), [])
    texts = named or [column.name for column in columns.texts if column is not columns.label][:2]
    if len(texts) < 2:
        return
    scores = [column for column in columns.labels(texts) if column.kind in ("integer", "number")]
    if scores and scores[0].mapped is None:
        keys = {"score": scores[0].name, "loss": "cosent", "metrics": ["spearman"]}
        yield {"type": "embedding", "texts": texts, **keys}, f"two texts, and their similarity in `{keys['score']}`"
    else:
        yield {"type": "embedding", "texts": texts}, "two texts that belong together"
