"""The row of `TINY_TASKS` for soft labels."""

from __future__ import annotations

import numpy as np

from tests.helpers.training import NUM_CLASSES, NUM_ROWS, TINY_BERT, TinyTask, tiny_split
from trainer.data.collate import Padding
from trainer.data.split import EncodedSplit


def tiny_probabilities(num_rows: int = NUM_ROWS) -> EncodedSplit:
    """Return the rows of `tiny_split` with random probabilities."""
    split, random = tiny_split(num_rows, has_classes=False), np.random.default_rng(1)
    split.arrays["labels"] = random.dirichlet([1.0] * NUM_CLASSES, num_rows).astype(np.float32)
    return split


TASKS = {
    "soft_labels": TinyTask(
        {"type": "sequence_classification", "text": "text", "probabilities": "soft", "labels": ["a", "b", "c"]},
        {"config": {**TINY_BERT, "initializer_range": 0.2}, "tokenizer": "none"},
        tiny_probabilities,
        Padding(0),
    ),
}
