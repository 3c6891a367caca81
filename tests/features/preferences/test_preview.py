"""Previews of preferences, and notes on their rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainer
from tests.helpers.training import tiny_recipe
from tests.tools.test_preview import assert_previewed, trainer_split
from trainer.recipe.reading.loading import load_recipe
from trainer.tasks.registry import build_task


@pytest.mark.parametrize(("recipe", "trained"), [("reward_sample", ""), ("dpo_sample", "the topic is formats. [SEP]")])
def test_the_tasks(recipe: str, trained: str):
    assert_previewed(recipe, ["chosen", "rejected"], "", trained)


@pytest.mark.parametrize(
    ("task", "ids", "desirable", "note"),
    [
        (
            {"type": "preference", "loss": {"type": "dpo"}},
            [4, 5, 6, 4, 5, 6],
            [],
            "1 of 1 training pairs have equal",
        ),
        ({"type": "reward_model"}, [4, 5, 6, 4, 5, 6], [], "1 of 1 training pairs have equal answers"),
        ({"type": "reward_model"}, [4, 5, 6, 4, 5, 7], [], None),
        ({"type": "preference", "loss": {"type": "kto"}}, [4] * 6, [1, 1], "all training answers are desirable"),
        ({"type": "preference", "loss": {"type": "kto"}}, [4] * 6, [0, 0], "all training answers are undesirable"),
        ({"type": "preference", "loss": {"type": "kto"}}, [4] * 6, [0, 1], None),
    ],
)
def test_answers_that_contrast_with_none_are_noted(
    task: dict[str, Any], ids: list[int], desirable: list[int], note: str | None
):
    labels = [] if task["type"] == "reward_model" else [-100, 5, 3, -100, 6, 3]
    split = trainer_split(labels, ids, {"desirable": np.array(desirable)} if desirable else {})
    found = build_task(tiny_recipe(task=task).task).answer_notes(split)
    assert [note in one for one in found] == [True] * (note is not None)


def test_an_answer_of_kto_has_its_label_and_the_other_answer_is_not_trained(tmp_path: Path):
    rows = [
        {"prompt": "the", "completion": text, "label": is_good} for text, is_good in ((" file", False), (" a", True))
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = [f"data.train={tmp_path / 'rows.jsonl'}", "data.validation=null", "task.loss.type=kto"]
    metrics = 'task.metrics=["reward_accuracy"]'
    found = trainer.preview(load_recipe("dpo_sample", [*keys, metrics, "training.global_batch_size=2"]), rows=2).rows
    assert [row.label for row in found] == ["undesirable", "desirable"]
    for row in found:
        assert [text.role for text in row.texts] == ["answer", "answer of the row before, for the divergence"]
        assert [any(piece.mark == "trained" for piece in text.pieces) for text in row.texts] == [True, False]
