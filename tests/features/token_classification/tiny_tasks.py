"""The row of `TINY_TASKS` for token classification."""

from __future__ import annotations

import numpy as np

from tests.helpers.training import NUM_CLASSES, NUM_ROWS, TINY_BERT, TinyTask, tiny_split
from trainer.data.collate import Padding
from trainer.data.split import EncodedSplit
from trainer.parallel.microbatch import IGNORED_LABEL


def tiny_tags(num_rows: int = NUM_ROWS) -> EncodedSplit:
    """Return the rows of `tiny_split` with random classes of about half of their tokens; every fifth row has none."""
    split, random = tiny_split(num_rows, has_classes=False), np.random.default_rng(1)
    rows = np.repeat(np.arange(num_rows), split.lengths)
    labels = random.integers(0, NUM_CLASSES, len(rows))
    labels[(random.random(len(rows)) < 0.5) | (rows % 5 == 0)] = IGNORED_LABEL
    split.tokens["labels"] = labels
    split.tokens["word_numbers"] = np.zeros(len(rows), np.int64)  # columns that the model does not take
    split.scalars["row_numbers"] = np.arange(num_rows)
    return split


TASKS = {
    "token_classification": TinyTask(
        {"type": "token_classification", "words": "words", "tags": "tags"},
        {"config": {**TINY_BERT, "initializer_range": 0.2}, "tokenizer": "none"},
        tiny_tags,
        Padding(0),
    ),
}
