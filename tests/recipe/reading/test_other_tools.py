"""Files that are no recipes get the command that makes one of them."""

from __future__ import annotations

import json

import pytest

from trainer.base.errors import RecipeError
from trainer.recipe.reading import other_tools
from trainer.recipe.reading.loading import load_recipe

ARGUMENTS = {"output_dir": "x", "num_train_epochs": 3, "learning_rate": 2e-5, "per_device_train_batch_size": 8}
DEEPSPEED = {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "fp16": {"enabled": True}, "optimizer": {}}
AXOLOTL = "base_model: x\nadapter: lora\nlora_r: 8\nsequence_len: 256\nlearning_rate: 0.1\nbf16: auto\n"
ACCELERATE = "compute_environment: LOCAL_MACHINE\nnum_processes: 2\n"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("args.json", json.dumps(ARGUMENTS), "TrainingArguments, not a recipe; convert it with: trainer convert"),
        ("ds.json", json.dumps(DEEPSPEED), "DeepSpeed, not a recipe; convert it with: trainer convert"),
        ("rows.CSV", "text,label\na,b\n", "is a file of data, not a recipe; write a recipe for it with: trainer init "),
        ("rows.jsonl.gz", "", "is a file of data, not a recipe; write a recipe for it with: trainer init "),
        ("axo.yml", AXOLOTL, "is a file of axolotl, not a recipe; convert it with: trainer convert"),
        ("acc.yaml", ACCELERATE, "is a file of accelerate, not a recipe; convert it with: trainer convert"),
    ],
)
def test_a_file_of_another_tool_is_named(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(tmp_path / name))
    assert len(caught.value.problems) == 1
    assert words in str(caught.value)
    assert name in str(caught.value)


def test_a_recipe_with_few_keys_is_recognised(tmp_path):
    (tmp_path / "r.json").write_text('{"name": "a", "precision": "bf16"}')
    with pytest.raises(RecipeError, match="`task` is missing"):
        load_recipe(str(tmp_path / "r.json"))


def test_keys_of_other_tools_are_unknown_without_the_module_that_knows_them(tmp_path, monkeypatch):
    monkeypatch.setattr(other_tools, "_modules", list)
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    with pytest.raises(RecipeError, match="`zero_optimization` is not a key; valid keys are name, task"):
        load_recipe(str(tmp_path / "ds.json"))
