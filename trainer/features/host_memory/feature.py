"""The checkpoints in memory as a feature: their tier, and the questions before a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.checkpoint.registered import TierFeature, TierParts
from trainer.checkpoint.store import CheckpointStore
from trainer.engine.precision import weights_dtype
from trainer.engine.products import rounded_by_autocast
from trainer.features.host_memory.folder import KEPT, folder_of_run, room_in
from trainer.features.host_memory.handover import free, hand_over
from trainer.features.host_memory.section import keys_of
from trainer.features.host_memory.tier import HostMemory
from trainer.ranks.environment import LaunchEnvironment
from trainer.ranks.joining import Rendezvous
from trainer.recipe.schema import Recipe

_FP32_BYTES, _BF16_BYTES = 4, 2


class HostMemoryFeature(TierFeature):
    """The tier of `checkpoint.memory`."""

    kept = KEPT

    def build(self, parts: TierParts) -> HostMemory:
        keys = keys_of(parts.recipe)
        tier = HostMemory(Path(keys.folder), parts.disk.store, parts.mesh, parts.note)
        tier.every = keys.every
        return tier

    def newest_facts(self, recipe: Recipe) -> Mapping[str, Any]:
        key = CheckpointStore(Path(recipe.checkpoint.folder), KEPT).read_memory_key()
        shares = sorted((_folder(recipe) / key).glob("rank-*")) if key else []
        facts = next(filter(None, (CheckpointStore(share, KEPT).newest_facts() for share in shares)), None)
        return {"origin": facts.origin} if facts else {}

    def hand_over(
        self, recipe: Recipe, meeting: Rendezvous, everyone: LaunchEnvironment, num_training: int, seconds: float
    ) -> list[str]:
        folder, run_folder = Path(keys_of(recipe).folder), Path(recipe.checkpoint.folder)
        return hand_over(folder, run_folder, meeting, everyone, num_training, seconds)

    def free(self, recipe: Recipe) -> None:
        free(Path(keys_of(recipe).folder), Path(recipe.checkpoint.folder))

    def notes(self, recipe: Recipe, model: nn.Module | None) -> list[str]:
        """Return a note if this machine cannot hold the checkpoints."""
        folder = Path(keys_of(recipe).folder)
        if not os.access(folder, os.W_OK):
            text = "which cannot be written here; each host of the run needs it"
            return [f"`checkpoint.memory.folder` is {folder}, {text}"]
        if model is None or recipe.model.adapter is not None or recipe.model.freeze:
            return []  # the weights in a checkpoint are few, or their number is unknown
        in_bf16 = set() if weights_dtype(recipe) == torch.float32 else rounded_by_autocast(model)
        needed = KEPT * sum(
            parameter.numel() * (_BF16_BYTES if name in in_bf16 else _FP32_BYTES)
            for name, parameter in model.named_parameters()
        )
        room, where = room_in(folder)
        if needed <= room:
            return []
        return [
            f"`checkpoint.memory.folder` is {folder}, with {room / 2**20:,.1f} MiB free {where} of this machine, but"
            f" {KEPT} checkpoints need {needed / 2**20:,.1f} MiB for the weights alone, over all hosts; enlarge it"
            " (docker run --shm-size, --memory), use more hosts, or set `checkpoint.memory` to null; `trainer plan`"
            " shows the bytes of each host"
        ]


def _folder(recipe: Recipe) -> Path:
    return folder_of_run(Path(keys_of(recipe).folder), Path(recipe.checkpoint.folder))
