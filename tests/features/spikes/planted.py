"""A tiny run with a row whose label makes the loss jump once in each epoch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.helpers.tiny_run import NUM_TRAIN_ROWS, write_tiny_run
from trainer.data.order import GlobalOrder

STEPS, BATCH, SEED = 16, 8, 42
PER_EPOCH = NUM_TRAIN_ROWS // BATCH


def jumps_at(row: int) -> list[int]:
    """Return the steps (from 1) with a row of the training split."""
    order = GlobalOrder(NUM_TRAIN_ROWS, None, BATCH, SEED)
    return [step + 1 for step in range(STEPS) if row in order.batch(*divmod(step, PER_EPOCH))]


def write_planted_run(folder: Path, row: int | None, **sections: Any) -> Path:
    """Write a run of 16 steps, in which a row has a label of 40 and the others labels below 1; None: no such row."""
    training = {"max_steps": STEPS, "global_batch_size": BATCH, "micro_batch_size": 4, "seed": SEED}
    watch = {"on_spike": "rewind", "spike_window": 4, "spike_factor": 20.0}
    recipe = write_tiny_run(
        folder,
        task={"type": "sequence_regression", "text": "text", "label": "score", "metrics": ["mse"]},
        data={"group_by_length": False, "validation": None},
        evaluation={"every": None},
        **{
            **sections,
            "training": {**training, **watch, **sections.get("training", {})},
            "checkpoint": {
                "folder": str(folder / "run"),
                "every": "2 steps",
                "keep": 3,
                **sections.get("checkpoint", {}),
            },
        },
    )
    read = json.loads(recipe.read_text())
    for key in ("best", "patience"):
        read["evaluation"].pop(key, None)
    read["evaluation"] = {"verify_export": 0}
    recipe.write_text(json.dumps(read))
    lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):
        line["score"] = 40.0 if number == row else (number % 7) / 7
        del line["label"]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return recipe
