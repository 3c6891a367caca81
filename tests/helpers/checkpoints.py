"""Checkpoints of untrained models, in the layout that a run with two ranks writes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint.counters import Progress
from trainer.checkpoint.format import MODEL_FOLDER, SUMS, Facts, share_name, write_bytes, write_share
from trainer.checkpoint.store import CheckpointStore
from trainer.models.save import save_configuration
from trainer.models.statistics import persistent_buffers
from trainer.observe.records import BestMetric

ORIGIN = {
    "recipe": {"name": "tiny", "task": {"type": "masked_lm"}, "precision": "fp32", "parallel": {"strategy": "fsdp"}},
    "layout": {"dp_replicate": 1, "dp_shard": 2, "tp": 1, "pp": 1},
    "versions": {"torch": "2"},
}


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors by the names that an engine uses, with one optimizer tensor for each parameter."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {
        **{f"model.{name}": weight for name, weight in weights.items()},
        **{f"buffer.{name}": buffer for name, buffer in persistent_buffers(model).items()},
        **{f"optimizer.{name}.exp_avg": torch.zeros_like(weight) for name, weight in weights.items()},
    }


def write_checkpoint(
    run: Path, model: nn.Module, step: int = 12, origin: Mapping[str, Any] = ORIGIN, extra: Mapping[str, bytes] = {}
) -> Path:
    """Write a checkpoint into a run's folder. Dimension 0 of every tensor is sharded over the files of two ranks."""
    store = CheckpointStore(run, keep=9)
    store.open()
    folder = store.begin(step)
    tensors = tensors_of(model)
    shares: list[dict[str, Tensor]] = [{}, {}]
    for name, tensor in tensors.items():
        if not tensor.dim():
            shares[0][f"{name}@"] = tensor
            continue
        half = tensor.shape[0] // 2
        for rank, (start, part) in enumerate([(0, tensor[:half]), (half, tensor[half:])]):
            if part.numel():
                shares[rank][f"{name}@{','.join(map(str, (start, *[0] * (tensor.dim() - 1))))}"] = part.contiguous()
    files = [write_share(folder, share_name(rank, 2), share) for rank, share in enumerate(shares)]
    (run / "configuration").mkdir(exist_ok=True)
    save_configuration(model, run / "configuration")
    beside = {file.name: file.read_bytes() for file in (run / "configuration").iterdir()} | dict(extra)
    files += [write_bytes(folder, f"{MODEL_FOLDER}/{name}", content) for name, content in beside.items()]
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    progress = Progress(step, step * 8, step * 64, BestMetric("accuracy", 0.5, step))
    return store.complete(Facts(progress, {}, origin, shapes, {}), files)


def reseal(folder: Path) -> None:
    """Update the checksums and the recorded sizes of changed files. Keep a `state.json` that cannot be parsed."""
    names = [line.split("  ")[1] for line in (folder / SUMS).read_text().splitlines()]
    try:
        facts = json.loads((folder / "state.json").read_text())
        facts["files"] = {name: (folder / name).stat().st_size for name in facts["files"]}
        (folder / "state.json").write_text(json.dumps(facts))
    except ValueError:
        pass
    sums = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (folder / SUMS).write_text("".join(sums))
