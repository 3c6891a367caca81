"""Texts that are empty, of one token, of special tokens or without labels: each task trains and evaluates on them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny_run import write_tiny_run
from tests.helpers.training import TINY_BERT, TINY_DECODERS
from trainer.cli import main

Row = dict[str, Any]
ODD = ["", "word1", "[CLS] [SEP]", "[PAD]", "?", "word2 word3"]
BERT = {**TINY_BERT, "initializer_range": 0.2}


def losses(folder: Path, rows_of: Callable[[str, int], Row], sections: Row, micro_batch_size: int) -> list[float]:
    """Return the losses of a run's steps and evaluations."""
    described = json.loads(
        write_tiny_run(
            folder,
            training={"max_steps": 3, "micro_batch_size": micro_batch_size},
            evaluation={"every": "3 steps", "batch_size": micro_batch_size},
        ).read_text()
    )
    recipe = folder / "recipe.json"
    model = {**described["model"], "config": BERT, **sections.get("model", {})}
    recipe.write_text(json.dumps({**described, **sections, "model": model}))
    for split, number in (("train", 16), ("validation", 7)):
        rows = [rows_of(ODD[index % len(ODD)], index) for index in range(number)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["run", str(recipe)]) == 0
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line] + [
        line["eval"]["loss"] for line in lines if "eval" in line
    ]


def assert_odd_rows_train(tmp_path: Path, rows_of: Callable[[str, int], Row], task: Row, **sections: Any) -> None:
    """Train on the rows of odd texts: finite losses, those of one microbatch.

    Args:
        tmp_path: The folder of the test.
        rows_of: Return a row from a text and its number.
        task: The section of the task.
        sections: Further sections; `model` is merged.
    """
    expected = losses(tmp_path / "whole", rows_of, {"task": task, **sections}, 8)
    assert len(expected) >= 4
    assert all(math.isfinite(loss) for loss in expected)
    single = losses(tmp_path / "single", rows_of, {"task": task, **sections}, 1)
    assert single == pytest.approx(expected, rel=1e-5, abs=1e-7)


def text_row(text: str, number: int) -> Row:
    return {"text": text}


@pytest.mark.nightly
def test_classes(tmp_path: Path) -> None:
    task = {"type": "sequence_classification", "text": "text"}
    assert_odd_rows_train(tmp_path, lambda text, number: {"text": text, "label": "ab"[number % 2]}, task)


@pytest.mark.nightly
def test_numbers(tmp_path: Path) -> None:
    task = {"type": "sequence_regression", "text": "text"}
    assert_odd_rows_train(tmp_path, lambda text, number: {"text": text, "label": number / 3}, task)


@pytest.mark.nightly
def test_masked_tokens(tmp_path: Path) -> None:
    task = {"type": "masked_lm", "text": "text", "mask_probability": 0.5, "metrics": ["perplexity"]}
    assert_odd_rows_train(tmp_path, text_row, task)


@pytest.mark.parametrize("packing", [{}, pytest.param({"packing": "documents"}, marks=pytest.mark.nightly)])
def test_documents(tmp_path: Path, packing: Row) -> None:
    task = {"type": "causal_lm", "text": "text", "metrics": ["perplexity"], **packing}
    assert_odd_rows_train(tmp_path, text_row, task, model={"config": TINY_DECODERS["llama"]})
