"""The rows of `TINY_TASKS` for rerankers."""

from __future__ import annotations

from functools import partial

import numpy as np

from tests.helpers.training import NUM_ROWS, TINY_BERT, TinyTask, tiny_tuples
from trainer.data.collate import Padding
from trainer.data.split import EncodedSplit


def tiny_relevances(num_rows: int = NUM_ROWS, highest: int = 3) -> EncodedSplit:
    """Return the rows of `tiny_tuples` with relevances of their texts, some of them equal; some texts are absent."""
    split, random = tiny_tuples(num_rows), np.random.default_rng(2)
    labels = random.integers(-1, highest, (num_rows, 3)).astype(np.float64)
    labels[:, 0], labels[:, 1] = highest, random.integers(0, highest, num_rows)
    split.arrays["labels"] = labels
    return split


TASKS = {
    "reranker": TinyTask(
        {"type": "reranker", "loss": "lambda", "label": "label"},
        {"config": {**TINY_BERT, "initializer_range": 0.2}, "tokenizer": "none"},
        tiny_relevances,
        Padding(0),
    ),
    "reranker_pairs": TinyTask(
        {"type": "reranker", "label": "label", "loss": "binary_cross_entropy", "positive_weight": 3.0},
        {"config": {**TINY_BERT, "initializer_range": 0.2}, "tokenizer": "none"},
        partial(tiny_relevances, highest=1),
        Padding(0),
    ),
}
