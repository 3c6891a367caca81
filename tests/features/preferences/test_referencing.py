"""The reference of a preference loss is kept under all facts that it depends on, and damage of it is found."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.helpers.tiny_run import WORDS, write_tiny_run
from trainer.features.preferences import referencing
from trainer.recipe.plan import plan_run
from trainer.recipe.reading.loading import load_recipe
from trainer.training.assembly import assemble
from trainer.training.process_group import open_mesh
from trainer.training.run_data import prepare_data

SIZES = {
    "vocab_size": len(WORDS) + 5, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 24, "initializer_range": 0.3,
}  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    model = {"name_or_path": "model", "config": None}
    file = write_tiny_run(tmp_path, task={"text": None}, model=model)
    keys = {**json.loads(file.read_text()), "task": {"type": "preference", "metrics": ["reward_accuracy"]}}
    file.write_text(json.dumps(keys))
    for split in ("train", "validation"):
        rows = [
            {"prompt": WORDS[row], "chosen": f" {WORDS[row + 1]}", "rejected": f" {WORDS[row + 2]}"} for row in range(9)
        ]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(tmp_path / "model")
    return file


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The splits that a reference was computed for."""
    found: list[str] = []
    compute = referencing._compute

    def counted(recipe: Any, data: Any, split: Any, *more: Any) -> Any:
        found.append(split.content_hash)
        return compute(recipe, data, split, *more)

    monkeypatch.setattr(referencing, "_compute", counted)
    return found


def reference(recipe: Path, **overrides: Any) -> torch.Tensor:
    loaded = load_recipe(str(recipe), [f"{key}={json.dumps(value)}" for key, value in overrides.items()]).recipe
    plan = plan_run(loaded, 1)
    parts = assemble(plan, open_mesh(plan.layout, torch.device("cpu")), prepare_data(loaded))
    return torch.from_numpy(parts.data.train.arrays["reference"].copy())


def edit_config(key: str, value: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "model" / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))

    return edit


def test_each_fact_of_the_model_gives_another_reference(recipe: Path, computed: list[str]):
    seen = [reference(recipe)]
    assert len(computed) == 1, "both splits have the same rows"
    for edit in (edit_config("hidden_act", "relu"), edit_config("rms_norm_eps", 0.5)):
        edit(recipe.parent)
        seen.append(reference(recipe))
    seen.append(reference(recipe, **{"model.config": {"rope_parameters": {"rope_type": "default", "rope_theta": 3.0}}}))
    seen.append(reference(recipe, precision="bf16"))
    assert len(computed) == len(seen)
    assert len({tuple(values.flatten().tolist()) for values in seen}) == len(seen)


def test_other_losses_and_places_read_the_same_reference(recipe: Path, computed: list[str]):
    expected = reference(recipe)
    shutil.copytree(recipe.parent / "model", recipe.parent / "elsewhere")
    elsewhere = str(recipe.parent / "elsewhere")
    overrides = {"model.name_or_path": elsewhere, "task.loss.beta": 0.5, "optimizer.learning_rate": 0.5}
    assert torch.equal(reference(recipe, **overrides), expected)
    assert len(computed) == 1


def test_a_damaged_reference_is_computed_again(recipe: Path, computed: list[str]):
    expected = reference(recipe)
    (entry,) = (place for place in (recipe.parent / "cache").glob("reference-*") if place.is_dir())
    times = 1
    for file in sorted(entry.iterdir()):
        for damage in (_flip, _cut, _pipe):
            damage(file)
            assert torch.equal(reference(recipe), expected), (file.name, damage)
            times += 1
            assert len(computed) == times, (file.name, damage)


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)
