"""Parity of `data.streaming`: the same rows, losses and weights under every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.helpers.ranks import RankPools
from tests.helpers.tiny_run import write_tiny_run
from tests.helpers.training import Curve, sgd_sections, train_tiny
from tests.helpers.turns import once
from tests.parity.cases import TOLERANCES, assert_same_curve, largest_difference
from trainer.base.digests import digest_of
from trainer.checkpoint.counters import Progress
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.schema import Recipe

STEPS = 7  # an epoch has five
SHARDS = (9, 13, 18)  # rows, in blocks of one row
STREAM: dict[str, Any] = {"streaming": True, "shuffle_window": 17, "group_by_length": False, "train": "part-*.jsonl"}
GPT2 = {
    "model_type": "gpt2", "vocab_size": 211, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32,
    "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "mapped": {
        "task": {"type": "sequence_classification", "text": "text", "label": "kind", "labels": ["x", "y"]},
        "data": {
            "map": {
                "columns": {
                    "text": "{text} word1",
                    "kind": {"column": "label", "values": {"a": "x", "b": "y", "c": "y"}},
                },
                "where": ["label != d"],
            }
        },
        "checkpoint": {"every": "100 steps"},
    },
    "mixed": {
        "task": {"type": "masked_lm", "text": "text"},
        "data": {"train": ["part-0.jsonl", "part-[12].jsonl"], "mixture": [0.6, 0.4]},
    },
    "packed": {
        "task": {"type": "causal_lm", "text": "text", "packing": "documents"},
        "model": {"config": GPT2, "tokenizer": "decoder"},
    },
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp-accumulated": (2, {"training": {"micro_batch_size": 2}}),
    "ddp-3": (3, {"training": {"micro_batch_size": 4}}),
    "fsdp-workers": (2, {"parallel": {"strategy": "fsdp"}, "data": {"num_workers": 2}}),
    "fsdp-3-tokens": (
        3,
        {
            "parallel": {"strategy": "fsdp"},
            "data": {"padding_free": True},
            "training": {"micro_batch_size": None, "micro_batch_tokens": 40},
        },
    ),
    "zero3": (2, {"parallel": {"strategy": "zero3"}}),
    "tensor": (2, {"parallel": {"tensor": 2}}),
    "stages": (2, {"parallel": {"pipeline": {"stages": 2}}}),
    "context": (2, {"parallel": {"context": 2}}),
}
CASES = [
    ("mapped", "ddp-accumulated"), ("packed", "ddp-3"), ("mixed", "ddp-3"), ("mapped", "fsdp-workers"),
    ("mixed", "fsdp-3-tokens"), ("packed", "zero3"), ("mapped", "tensor"), ("packed", "stages"),
    ("mixed", "context"),
]  # fmt: skip
FAST = (("packed", "ddp-3"), ("mapped", "tensor"))


def recipe_of(folder: Path, *layers: dict[str, Any]) -> Recipe:
    """Return the recipe of `write_stream` with the sections of layers; those of unions are replaced."""
    recipe = json.loads((folder / "recipe.json").read_text())
    base = {
        "model": {"dropout": 0.1},
        "training": {"global_batch_size": 12, "micro_batch_size": 12, "max_steps": STEPS},
        "data": STREAM,
        "evaluation": {"every": "100 steps"},
    }
    for layer in (base, *layers):
        for section, keys in layer.items():
            is_union = section in ("task", "optimizer", "schedule")
            recipe[section] = keys if is_union else {**recipe.get(section, {}), **keys}
    file = folder / f"{digest_of(recipe)}.json"
    file.write_text(json.dumps(recipe))
    return load_recipe(str(file)).recipe


def recipes_of(folder: Path, kind: str, keys: dict[str, Any]) -> tuple[Recipe, Recipe]:
    """Return a recipe with AdamW, and one with gradient descent, which shows the gradient's scale."""
    sgd = {**sgd_sections(), "training": {**keys.get("training", {}), "max_grad_norm": None}}
    return recipe_of(folder, KINDS[kind], keys), recipe_of(folder, KINDS[kind], {**keys, **sgd})


def train(recipe: Recipe, sgd: Recipe) -> tuple[Curve, Curve]:
    """Train on this rank."""
    return train_tiny(recipe, num_steps=STEPS, progress=Progress()), train_tiny(sgd, num_steps=1, progress=Progress())


def write_stream(folder: Path) -> None:
    write_tiny_run(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    tokenizer.eos_token = "[SEP]"
    tokenizer.save_pretrained(folder / "decoder")
    rows = (folder / "train.jsonl").read_text().splitlines()
    start = 0
    for number, size in enumerate(SHARDS):
        (folder / f"part-{number}.jsonl").write_text("\n".join(rows[start : start + size]) + "\n")
        start += size
    assert start == len(rows)


@pytest.mark.parametrize(
    ("kind", "layout"), [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in CASES]
)
def test_any_layout_is_one_process(ranks: RankPools, tmp_path: Path, kind: str, layout: str):
    world_size, keys = LAYOUTS[layout]
    write_stream(tmp_path)
    expected, expected_sgd = once(f"stream-{kind}", lambda: train(*recipes_of(tmp_path, kind, {})))
    for curve, sgd in ranks(world_size).run(train, *recipes_of(tmp_path, kind, keys)):
        assert_same_curve(curve, expected)
        assert largest_difference(sgd, expected_sgd) <= TOLERANCES["fp32"].sgd_weights
