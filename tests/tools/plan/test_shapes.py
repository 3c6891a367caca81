"""Shapes of models that come with the package: their parameters are the published ones, and plans need no network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

import trainer
from trainer.cli import main
from trainer.recipe.reading.shipped import own_recipes
from trainer.tools.plan.shapes import head_of, known_shapes, parameters_of, shape_of, shipped_models

SOME = (
    "answerdotai/ModernBERT-large",
    "distilbert/distilbert-base-uncased",
    "google-t5/t5-base",
    "openai-community/gpt2",
)


def _built(name: str) -> int:
    values = shape_of(name)
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        model = getattr(transformers, head_of(name)).from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("names", [SOME, pytest.param(known_shapes(), marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_built_model_has_the_published_parameters(names: list[str]):
    assert {name: _built(name) for name in names} == {name: parameters_of(name) for name in names}


def test_all_shipped_recipes_have_a_shape():
    bases = ("bert_base", "modernbert_masked")
    recipes = [trainer.load_recipe(name).recipe for name in own_recipes() if name not in bases]
    names = {name for recipe in recipes if (name := recipe.model.name_or_path) and not name.startswith("runs/")}
    assert len(names) > 8
    assert names <= {*known_shapes()}
    assert len(known_shapes()) > 60


def test_a_plan_and_a_check_need_no_network(capsys: pytest.CaptureFixture[str]):
    words = ["bert_base_mrpc", "parallel.tensor=2", "data.max_length=16", "training.micro_batch_size=2", "compile=true"]
    assert main(["plan", *words, "--gpus", "2x12gib", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["fits"]
    assert made["parameters"] == 109482240 + 2 * 768 + 2  # with two classes
    # Each of two ranks has half of a layer; the embedding is cut, too.
    assert 109482240 * 4 / 2 < made["ranks"][0]["resident"]["parameters"] < 109482240 * 4 * 0.52
    assert made["notes"] == [
        "the shape of google-bert/bert-base-uncased comes with the package; a configuration in the hub's cache would"
        " have precedence",
        "`compile` is not counted: its layers fuse operations, so time and memory of the plan are upper bounds",
    ]
    assert main(["check", *words, "--processes", "2"]) == 0
    shown = capsys.readouterr().out
    assert "note      the shape of google-bert/bert-base-uncased comes" in shown
    assert "unchecked `model.name_or_path` (weights, tokenizer and lengths of rows): google-bert/" in shown


def test_a_run_does_not_use_a_shape_and_an_unknown_model_has_none(capsys: pytest.CaptureFixture[str]):
    assert main(["run", "bert_base_mrpc", "--processes", "1"]) != 0
    assert "google-bert/bert-base-uncased" in capsys.readouterr().err
    assert main(["plan", "bert_base_mrpc", "model.name_or_path=owner/unknown", "--gpus", "1x12GiB"]) == 2
    assert "the hub cannot be reached; a plan needs its configuration only" in capsys.readouterr().err


def test_the_hubs_cache_has_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recipe = trainer.load_recipe("bert_base_mrpc").recipe
    assert shipped_models(recipe) == {"model.name_or_path": "google-bert/bert-base-uncased"}
    cached = tmp_path / "models--google-bert--bert-base-uncased" / "snapshots" / "main"
    cached.mkdir(parents=True)
    (cached / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    assert shipped_models(recipe) == {}
