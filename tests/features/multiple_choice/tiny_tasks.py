"""The row of `TINY_TASKS` for multiple choice."""

from __future__ import annotations

import numpy as np

from tests.helpers.training import NUM_ROWS, TINY_BERT, TinyTask, tiny_tuples
from trainer.data.collate import Padding
from trainer.data.split import EncodedSplit


def tiny_choices(num_rows: int = NUM_ROWS) -> EncodedSplit:
    """Return rows of two or three choices, of 3 to 17 random tokens each, with the index of the right one."""
    split, random = tiny_tuples(num_rows), np.random.default_rng(1)
    counts = random.integers(2, 4, num_rows)
    split.scalars |= {"num_choices": counts, "labels": random.integers(0, counts)}
    return split


TASKS = {
    "multiple_choice": TinyTask(
        {"type": "multiple_choice"},
        {"config": {**TINY_BERT, "initializer_range": 0.2}, "tokenizer": "none"},
        tiny_choices,
        Padding(0),
    ),
}
