"""The rows of `TINY_TASKS` for preferences."""

from __future__ import annotations

from functools import partial

import numpy as np

from tests.helpers.training import NUM_ROWS, TINY_BERT, TINY_DECODERS, TinyTask, tiny_tuples
from trainer.data.collate import Padding
from trainer.data.split import EncodedSplit
from trainer.parallel.microbatch import IGNORED_LABEL


def tiny_answers(num_rows: int = NUM_ROWS, is_labelled: bool = False, labels_prompts: bool = False) -> EncodedSplit:
    """Return rows of two random texts, each with the next tokens of its last half as labels.

    `is_labelled` adds whether a row is desirable; `labels_prompts` labels all tokens, and marks the halves.
    """
    split = tiny_tuples(num_rows, texts_per_row=2)
    split.content_hash = f"tiny answers {is_labelled} {labels_prompts}"
    lengths = np.diff(split.offsets)
    places = np.concatenate([np.arange(length) for length in lengths])
    answer = places >= np.repeat(lengths // 2, lengths)
    split.tokens["labels"] = np.roll(split.tokens["input_ids"], -1)
    if labels_prompts:
        split.tokens["answer"] = answer.astype(np.int64)
    else:
        split.tokens["labels"][~answer] = IGNORED_LABEL
    if is_labelled:
        split.scalars["desirable"] = np.random.default_rng(1).integers(0, 2, num_rows)
    return split


TASKS = {
    "preference": TinyTask(
        {"type": "preference"}, {"config": TINY_DECODERS["llama"], "tokenizer": "none"}, tiny_answers, Padding(0)
    ),
    "reward_model": TinyTask(
        {"type": "reward_model", "margin": "margin", "center_coefficient": 0.1},
        {"config": {**TINY_BERT, "initializer_range": 0.2}, "tokenizer": "none"},
        partial(tiny_tuples, texts_per_row=2, has_scores=True),
        Padding(0),
    ),
    "preference_orpo": TinyTask(
        {"type": "preference", "loss": {"type": "orpo"}, "logits_chunk": 7},
        {"config": TINY_DECODERS["gpt2"], "tokenizer": "none"},
        partial(tiny_answers, labels_prompts=True),
        Padding(0),
    ),
    "preference_kto": TinyTask(
        {"type": "preference", "loss": {"type": "kto", "undesirable_weight": 0.7}},
        {"config": TINY_DECODERS["llama"], "tokenizer": "none"},
        partial(tiny_answers, is_labelled=True),
        Padding(0),
        graphs_refusal="each loss of this task depends on all rows",
    ),
}
