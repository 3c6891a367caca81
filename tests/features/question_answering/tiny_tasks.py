"""The row of `TINY_TASKS` for question answering."""

from __future__ import annotations

import numpy as np

from tests.helpers.training import NUM_ROWS, TINY_BERT, TinyTask, tiny_split
from trainer.data.collate import Padding
from trainer.data.split import EncodedSplit


def tiny_windows(num_rows: int = NUM_ROWS) -> EncodedSplit:
    """Return windows of questions: the rows of `tiny_split` with random positions of the answers as labels."""
    split, random = tiny_split(num_rows, has_classes=False), np.random.default_rng(1)
    split.arrays["labels"] = np.sort(random.integers(0, split.lengths[:, None], (num_rows, 2)), axis=1)
    return split


TASKS = {
    "question_answering": TinyTask(
        {"type": "question_answering"},
        {"config": {**TINY_BERT, "initializer_range": 0.2}, "tokenizer": "none"},
        tiny_windows,
        Padding(0),
    ),
}
