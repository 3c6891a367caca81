"""The columns of embeddings, for `trainer init`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer.features import Columns

_TEXTS = (
    ("anchor", "positive", "negative"), ("query", "positive", "negative"), ("question", "positive", "negative"),
    ("anchor", "positive"), ("query", "positive"),
)  # fmt: skip


def of_embeddings(columns: Columns) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the section `task` and the reason for it."""
    for names in _TEXTS:
        if texts := columns.every(("text",), *names):
            yield {"type": "embedding", "texts": texts}, "texts that belong together"
            return
