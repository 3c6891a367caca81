"""Recipes in folders of models, which may come from someone else."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers.recipes import write_anew
from trainer.base.errors import TrainerError, UsageError
from trainer.recipe.reading.files import RECIPE_FILE
from trainer.use.trained import load_trained

VALUES = (None, True, "x", "</script>\x1b[31m", [], {}, [1], {"a": 1}, -1, 0, 1.5, 1e308, 10**400, [[["x"]]], "\ud800")
KEYS = (
    "task", "data", "data.train", "data.validation", "data.max_length", "training", "training.micro_batch_size",
    "evaluation", "evaluation.batch_size", "parallel", "parallel.strategy", "parallel.join_timeout", "model",
)  # fmt: skip


def load(folder: Path, text: str) -> None:
    write_anew(folder / "config.json", "{}")
    write_anew(folder / RECIPE_FILE, text)
    for evaluates in (False, True):
        load_trained(folder, None, [], 2, evaluates)


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{}", "{" * 50_000, '{"a":' * 50_000, '{"data": null}', '{"data": []}']
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, text: str):
    with pytest.raises(UsageError, match="must be a recipe"):
        load(tmp_path, text)


@pytest.mark.parametrize("key", KEYS)
def test_hostile_values_are_refused_or_read(tmp_path: Path, key: str):
    section, _, name = key.partition(".")
    data = {"source": "files", "train": str(tmp_path / "config.json"), "validation": str(tmp_path / "config.json")}
    run = {"name": "x", "model": {"name_or_path": "x"}, "training": {"max_steps": 1}}
    recipe = {**run, "task": {"type": "masked_lm", "text": "text"}, "data": data, "parallel": {"strategy": "fsdp"}}
    load(tmp_path, json.dumps(recipe))
    for value in VALUES:
        changed = {**recipe, section: {**recipe.get(section, {}), name: value} if name else value}
        with suppress(TrainerError):
            load(tmp_path, json.dumps(changed))
