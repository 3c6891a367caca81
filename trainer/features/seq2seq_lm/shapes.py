"""The columns of texts and their targets, for `trainer init`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer.features import Columns

_SEQUENCES = (
    ("source", "target"), ("document", "summary"), ("article", "highlights"), ("article", "summary"),
    ("dialogue", "summary"), ("text", "summary"), ("input_text", "target_text"),
)  # fmt: skip
_LABEL_CHARACTERS = 40
"""The most characters of a target that may be the name of a class."""


def of_sequences(columns: Columns) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the section `task` and the reason for it."""
    for names in _SEQUENCES:
        pair = columns.every(("text",), *names)
        if pair and sum(column.characters for column in columns.all if column.name == pair[1]) > _LABEL_CHARACTERS:
            yield {"type": "seq2seq_lm", "source": pair[0], "target": pair[1]}, "a source and its target text"
            return
