"""Texts that are empty, of one token, of special tokens or without labels: each task trains and evaluates on them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.seq2seq import tiny_tokenizer
from tests.helpers.tiny_run import write_tiny_run
from tests.helpers.training import TINY_BART, TINY_BERT, TINY_DECODERS
from trainer.cli import main

Row = dict[str, Any]
ODD = ["", "word1", "[CLS] [SEP]", "[PAD]", "?", "word2 word3"]
BERT = {"config": {**TINY_BERT, "initializer_range": 0.2}}


def tags_row(text: str, number: int) -> Row:
    words = text.replace("[CLS] [SEP]", "word9 [SEP] word9").split()  # special tokens at the ends are refused
    return {"words": words, "tags": ["B-X" if "word" in word else "O" for word in words]}


def question_row(text: str, number: int) -> Row:
    """Return a row with a long context, so that most windows have no answer, or one without an answer."""
    context = " ".join(f"word{place}" for place in range(1, 40)) if number % 2 else text or "word5"
    first = context.split()[0]
    answers = {"text": [first], "answer_start": [0]} if number % 3 else {"text": [], "answer_start": []}
    return {"question": "word1", "context": context, "answers": answers}


def choice_row(text: str, number: int) -> Row:
    return {"context": text, "choices": ["word1", text or "word2", "[SEP]"][: 2 + number % 2], "label": number % 2}


CASES: dict[str, tuple[Row, Callable[[str, int], Row], Row]] = {
    "sequence_classification": ({"text": "text"}, lambda text, n: {"text": text, "label": "ab"[n % 2]}, BERT),
    "multi_label": (
        {"type": "sequence_classification", "text": "text", "multi_label": True, "metrics": ["f1_micro"]},
        lambda text, n: {"text": text, "label": ["a", "b"][: n % 3]},
        BERT,
    ),
    "sequence_regression": ({"text": "text"}, lambda text, n: {"text": text, "label": n / 3}, BERT),
    "masked_lm": (
        {"text": "text", "mask_probability": 0.5, "metrics": ["perplexity"]},
        lambda text, n: {"text": text},
        BERT,
    ),
    "token_classification": ({"words": "words", "tags": "tags", "metrics": ["f1"]}, tags_row, BERT),
    "question_answering": ({"unanswerable": True}, question_row, BERT),
    "multiple_choice": ({}, choice_row, BERT),
    "causal_lm": ({"text": "text", "metrics": ["perplexity"]}, lambda text, n: {"text": text}, TINY_DECODERS["llama"]),
    "causal_lm_packed": (
        {"type": "causal_lm", "text": "text", "packing": "documents", "metrics": ["perplexity"]},
        lambda text, n: {"text": text},
        TINY_DECODERS["llama"],
    ),
    "embedding": ({"texts": ["a", "b"]}, lambda text, n: {"a": text or "word4", "b": f"word{n}"}, BERT),
    "seq2seq_lm": (
        {"metrics": ["perplexity"], "max_target_length": 8},
        lambda text, n: {"source": text if "word" in text else "word4", "target": ["", "word1"][n % 2]},
        TINY_BART,
    ),
}


def losses(folder: Path, name: str, micro_batch_size: int) -> list[float]:
    """Return the losses of a run's steps and evaluations."""
    keys, row, model = CASES[name]
    sections = {
        "training": {"max_steps": 3, "micro_batch_size": micro_batch_size},
        "evaluation": {"every": "3 steps", "batch_size": micro_batch_size},
        "model": model if "config" in model else {"config": model},
    }
    recipe = write_tiny_run(folder, **sections)
    described = json.loads(recipe.read_text())
    recipe.write_text(json.dumps({**described, "task": {"type": name, **keys}}))
    for split, number in (("train", 16), ("validation", 7)):
        rows = [row(ODD[index % len(ODD)], index) for index in range(number)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if name == "seq2seq_lm":
        tiny_tokenizer().save_pretrained(folder / "tokenizer")
    assert main(["run", str(recipe)]) == 0
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line] + [
        line["eval"]["loss"] for line in lines if "eval" in line
    ]


IN_EACH_RUN = ("token_classification", "embedding", "causal_lm")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_EACH_RUN else pytest.mark.nightly) for name in CASES]
)
def test_odd_rows_train_as_in_one_microbatch(name: str, tmp_path: Path) -> None:
    expected = losses(tmp_path / "whole", name, 8)
    assert len(expected) >= 4
    assert all(math.isfinite(loss) for loss in expected)
    assert losses(tmp_path / "single", name, 1) == pytest.approx(expected, rel=1e-5, abs=1e-7)
