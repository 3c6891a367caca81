"""Small checkpoints with content that depends on the step only, saved without an engine."""

from __future__ import annotations

import os
import random
from pathlib import Path

import torch
from torch import Tensor

from trainer.checkpoint.counters import Progress
from trainer.checkpoint.format import FACTS, SUMS, Facts, share_name, snapshot, write_bytes, write_share
from trainer.checkpoint.reading import SavedState, open_verified
from trainer.checkpoint.store import CheckpointStore
from trainer.observe.records import BestMetric
from trainer.parallel.shards.boxes import Box, TensorPart

MODEL_FILE = "model/config.json"
LARGE = 200_000  # elements: enough for a kill during the write
FILES = [SUMS, MODEL_FILE, share_name(0, 1), FACTS]


def tensors_of(step: int, num_elements: int = 12) -> dict[str, Tensor]:
    """Return tensors filled with the step, which reveals a mixture of two checkpoints."""
    weight = torch.full((num_elements // 4, 4), float(step))
    return {"model.weight": weight, "optimizer.weight.step": torch.tensor(float(step))}


def facts_of(step: int, tensors: dict[str, Tensor], best: int | None = None) -> Facts:
    return Facts(
        Progress(step, step * 8, step * 77, BestMetric("accuracy", 0.1 + 0.2, best or 0) if best else None, 1),
        {"seed": 1, "betas": [0.9, 0.999]},
        {"layout": "one process"},
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        {"loss_scaler.scale": 65536.0},
    )


def save(store: CheckpointStore, step: int, best: int | None = None, num_elements: int = 12) -> Path:
    """Save a checkpoint as a run with one rank does."""
    tensors = tensors_of(step, num_elements)
    folder = store.begin(step)
    parts = [TensorPart(name, tuple(t.shape), (Box((0,) * t.dim(), t),)) for name, t in tensors.items()]
    files = [write_share(folder, share_name(0, 1), snapshot(parts)), write_bytes(folder, MODEL_FILE, b"{}")]
    return store.complete(facts_of(step, tensors, best), files)


def newest(store: CheckpointStore) -> tuple[SavedState | None, list[str]]:
    """Return the newest valid checkpoint, and the problems of the newer ones."""
    problems = []
    for step in reversed(store.steps()):
        try:
            return open_verified(store.path(step)), problems
        except (OSError, ValueError) as error:
            problems.append(str(error))
    return None, problems


def is_whole(state: SavedState | None, step: int, num_elements: int = 12) -> bool:
    """Return whether a checkpoint is that of `step` in all elements."""
    return (
        state is not None
        and state.facts.progress.step == step
        and all(torch.equal(state.read(name), tensor) for name, tensor in tensors_of(step, num_elements).items())
    )


def changed(content: bytes, change: int) -> bytes:
    """Return content with a flipped bit, cut, doubled, or of another file."""
    place = random.Random(change).randrange(len(content))
    kinds = (
        content[:place] + bytes([content[place] ^ 1 << change % 8]) + content[place + 1 :],
        content[:place],
        content[:place] + content,
        os.urandom(len(content)),
    )
    return kinds[change % len(kinds)]
