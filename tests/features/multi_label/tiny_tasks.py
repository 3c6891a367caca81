"""The row of `TINY_TASKS` for several labels of a row."""

from __future__ import annotations

import numpy as np

from tests.helpers.training import NUM_CLASSES, NUM_ROWS, TINY_BERT, TinyTask, tiny_split
from trainer.data.collate import Padding
from trainer.data.split import EncodedSplit


def tiny_label_lists(num_rows: int = NUM_ROWS) -> EncodedSplit:
    """Return the rows of `tiny_split` with random lists of labels, some of them empty."""
    split, random = tiny_split(num_rows, has_classes=False), np.random.default_rng(1)
    split.arrays["labels"] = random.integers(0, 2, (num_rows, NUM_CLASSES)).astype(np.float32)
    return split


TASKS = {
    "multi_label": TinyTask(
        {"type": "sequence_classification", "text": "text", "multi_label": True},
        {"config": {**TINY_BERT, "initializer_range": 0.2}, "tokenizer": "none"},
        tiny_label_lists,
        Padding(0),
    ),
}
