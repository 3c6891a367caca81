"""The rows of `TINY_TASKS` for sequence-to-sequence language modelling."""

from __future__ import annotations

import numpy as np

from tests.helpers.training import (
    NUM_ROWS,
    NUM_SPECIAL,
    T5_END,
    TINY_BART,
    TINY_T5,
    VOCABULARY,
    TinyTask,
    tiny_split,
)
from trainer.data.collate import Padding
from trainer.data.split import EncodedSplit, Ragged


def tiny_targets(num_rows: int = NUM_ROWS) -> EncodedSplit:
    """Return the texts of `tiny_split` with targets of 1 to 11 random tokens that end with T5's end token."""
    split, random = tiny_split(num_rows, has_classes=False), np.random.default_rng(1)
    lengths = random.integers(1, 12, num_rows)
    offsets = np.concatenate([[0], lengths.cumsum()])
    labels = random.integers(NUM_SPECIAL, VOCABULARY, int(lengths.sum()))
    labels[offsets[1:] - 1] = T5_END
    starts = np.concatenate([[0], labels[:-1]])
    starts[offsets[:-1]] = 0  # the padding token starts each target
    split.ragged = {"labels": Ragged(offsets, labels), "decoder_input_ids": Ragged(offsets, starts)}
    return split


TASKS = {
    "seq2seq_lm": TinyTask({"type": "seq2seq_lm"}, {"config": TINY_T5, "tokenizer": "none"}, tiny_targets, Padding(0)),
    "seq2seq_lm_bart": TinyTask(
        {"type": "seq2seq_lm"}, {"config": TINY_BART, "tokenizer": "none"}, tiny_targets, Padding(0)
    ),
}
