"""The columns of words with tags and of texts with spans, for `trainer init`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer.features import Columns


def of_words(columns: Columns) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield sections `task` and the reasons for them."""
    words = columns.get(("texts",), "words", "tokens")
    tags = columns.get(("texts", "numbers"), "tags", "ner_tags", "pos_tags", "labels")
    if words and tags:
        yield {"type": "token_classification", "words": words.name, "tags": tags.name}, "a tag for each word of a list"
    text, spans = columns.get(("text",), "text"), columns.get(("objects",), "spans", "entities")
    if text and spans:
        yield {"type": "token_classification", "text": text.name, "spans": spans.name}, "entities as spans of a text"
