"""The trainings of the campaign: tiny ones that together hold each kind of state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.tiny_run import write_tiny_run
from tests.helpers.training import TINY_BERT

STEPS = 8
_WIDE = {"config": {**TINY_BERT, "hidden_size": 64, "intermediate_size": 128}, "dropout": 0.1}
_MODEL = {"config": TINY_BERT, "dropout": 0.1}
_LORA = {"type": "lora", "rank": 4}


@dataclass(frozen=True)
class Feature:
    """A training: its number of ranks, and the sections of its recipe that differ from `write_tiny_run`."""

    sections: Mapping[str, Any]
    processes: int = 2
    memory: str | None = None  # how often to save a checkpoint in memory
    mirror: bool = False
    shards: bool = False  # the rows are a stream of two shards


def _feature(processes: int = 2, **sections: Any) -> Feature:
    options = {name: sections.pop(name) for name in ("memory", "mirror", "shards") if name in sections}
    return Feature({"model": _MODEL, **sections}, processes, **options)


FEATURES: dict[str, Feature] = {
    "ddp": _feature(parallel={"strategy": "ddp"}, memory="1 step", mirror=True, data={"num_workers": 1}),
    "fsdp": _feature(parallel={"strategy": "fsdp"}, memory="1 step", data={"num_workers": 2}),
    "zero1": _feature(parallel={"strategy": "zero1"}, mirror=True),
    "zero2": _feature(parallel={"strategy": "zero2"}, memory="1 step"),
    "zero3": _feature(parallel={"strategy": "zero3"}, memory="1 step"),
    "tensor": _feature(parallel={"tensor": 2}, memory="1 step"),
    "stages": _feature(parallel={"pipeline": {"stages": 2, "microbatches": 2}}, memory="1 step", mirror=True),
    "average": _feature(
        parallel={"strategy": "fsdp"},
        training={"ema_decay": 0.9},
        model={**_MODEL, "freeze": ["embeddings"], "unfreeze_at_step": 4},
        optimizer={"groups": [{"match": "classifier", "learning_rate": 3e-3}]},
        memory="1 step",
    ),
    "LoRA on nf4": _feature(
        parallel={"strategy": "ddp"}, model={**_WIDE, "adapter": _LORA, "quantization": "nf4"}, mirror=True
    ),
    "DoRA": _feature(1, model={**_MODEL, "adapter": {**_LORA, "type": "dora"}}, data={"num_workers": 1}),
    "muon": _feature(parallel={"strategy": "fsdp"}, optimizer={"name": "muon"}, memory="1 step"),
    "adamw_8bit": _feature(parallel={"strategy": "fsdp"}, model=_WIDE, optimizer={"name": "adamw_8bit"}),
    "schedule-free": _feature(
        1, optimizer={"name": "schedule_free_adamw"}, schedule={"name": "constant", "warmup": 0}, mirror=True
    ),
    "adafactor": _feature(1, optimizer={"name": "adafactor"}, checkpoint={"asynchronous": False}),
    "stream": _feature(
        parallel={"strategy": "ddp"}, data={"streaming": True, "shuffle_window": 16, "num_workers": 1},
        memory="1 step", shards=True,
    ),
    "mixture": _feature(parallel={"strategy": "fsdp"}, data={"mixture": [0.7, 0.3]}, shards=True, mirror=True),
    "mixed stream": _feature(
        1, data={"streaming": True, "shuffle_window": 16, "mixture": [0.7, 0.3]}, shards=True,
        checkpoint={"asynchronous": False},
    ),
    "early stop": _feature(
        parallel={"strategy": "ddp"},
        training={"max_steps": 40},
        evaluation={"every": "1 step", "patience": 3},
        logging={"to": ["jsonl", "csv", "tensorboard"]},
    ),
    "bf16 weights": _feature(
        parallel={"strategy": "fsdp"}, precision="bf16", weights="bf16_stochastic", memory="1 step"
    ),
    "fp16": _feature(parallel={"strategy": "ddp"}, precision="fp16", mirror=True),
}  # fmt: skip


def write_feature(name: str, folder: Path) -> Path:
    """Write the recipe of a feature, with its data, and return its path. All files of the run lie in `folder`."""
    feature = FEATURES[name]
    checkpoint: dict[str, Any] = {"every": "2 steps"}
    if feature.memory:
        (folder / "memory").mkdir(parents=True, exist_ok=True)
        checkpoint["memory"] = {"every": feature.memory, "folder": str(folder / "memory")}
    if feature.mirror:
        checkpoint["mirror"] = str(folder / "mirror")
    data: dict[str, Any] = {"cache": "cache"}
    if feature.shards:
        data |= {"train": ["first.jsonl", "second.jsonl"], "group_by_length": False}
    given = feature.sections
    sections = {
        "evaluation": {"every": "3 steps"},
        **given,
        "training": {"max_steps": STEPS, **given.get("training", {})},
        "checkpoint": {**checkpoint, **given.get("checkpoint", {})},
        "data": {**data, **given.get("data", {})},
    }
    if sections["data"].get("streaming"):
        sections["task"] = {"labels": ["a", "b", "c"]}
    recipe = write_tiny_run(folder, **sections)
    if feature.shards:
        rows = (folder / "train.jsonl").read_text().splitlines(keepends=True)
        (folder / "first.jsonl").write_text("".join(rows[:25]))
        (folder / "second.jsonl").write_text("".join(rows[25:]))
    _shorten(recipe)
    return recipe


def _shorten(recipe: Path) -> None:
    """Let ranks give up soon if one of them hangs."""
    keys = json.loads(recipe.read_text())
    keys["parallel"] = {**keys.get("parallel", {}), "stall_timeout": "100 seconds"}
    recipe.write_text(json.dumps(keys))
