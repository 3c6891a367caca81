"""The facts of a run for its start-up summary and the first line of `metrics.jsonl`."""

from __future__ import annotations

import hashlib
import json
import platform
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import nn

from trainer import __version__
from trainer.data.split import EncodedSplit
from trainer.launch.environment import LaunchEnvironment
from trainer.observe.meter import ModelSize, peak_flops
from trainer.observe.records import Kind, MajorityClass, ParameterGroup, RunInfo
from trainer.parallel.embedding import FeatureParallelEmbedding, VocabParallelEmbedding
from trainer.parallel.linear import ColumnParallelLinear
from trainer.parallel.mesh import AXES, ParallelMesh
from trainer.parallel.placement import ParameterPlacement, Placements
from trainer.parallel.state_bytes import StateBytes, state_bytes
from trainer.recipe.plan import RunPlan
from trainer.recipe.schema import AdamW, Recipe
from trainer.tasks.task import Task

_PACKAGES = ("torch", "transformers", "datasets", "accelerate", "deepspeed", "safetensors", "numpy")


def _versions() -> dict[str, str]:
    versions = {"trainer": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def device_name(device: torch.device) -> str:
    """As the vendor calls it, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _parameter_groups(
    model: nn.Module, placements: Placements, mesh: ParallelMesh, bytes_per_element: int
) -> tuple[ParameterGroup, ...]:
    names = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    tied = {name for name, parameter in model.named_parameters() if names[id(parameter)] > 1}

    def kinds(placement: ParameterPlacement) -> Iterator[str]:
        yield "frozen" if not placement.trainable else "split" if placement.splits else "replicated"
        if placement.name in tied:
            yield "tied"

    sizes = {axis: mesh.size(axis) for axis in AXES}
    groups = []
    for name in get_args(Kind):
        members = [placement for placement in placements.values() if name in kinds(placement)]
        if members:
            groups.append(
                ParameterGroup(
                    placement=name,
                    num_tensors=len(members),
                    num_parameters=sum(int(np.prod(member.shape)) for member in members),
                    bytes_per_rank=sum(member.num_elements(sizes) for member in members) * bytes_per_element,
                )
            )
    return tuple(groups)


def planned_state_bytes(plan: RunPlan, placements: Placements, mesh: ParallelMesh) -> StateBytes:
    """What the rank that holds the most holds of this run's training state, by formula."""
    optimizer, strategy = plan.recipe.optimizer, plan.strategy
    tensors = 2 if isinstance(optimizer, AdamW) else int(optimizer.momentum > 0)
    master_copies = int(strategy.zero_stage > 0)  # DeepSpeed keeps one beside the parameters, in fp32 too
    return state_bytes(
        placements,
        {axis: mesh.size(axis) for axis in AXES},
        cut_gradients=strategy.cuts_gradients,
        cut_optimizer=strategy.cuts_optimizer,
        optimizer_tensors=tensors + master_copies,
    )


def _majority(task: Task, split: EncodedSplit | None) -> MajorityClass | None:
    names = task.model_options().get("id2label")
    if split is None or names is None or "labels" not in split.scalars:
        return None
    counts = np.bincount(split.scalars["labels"])
    return MajorityClass(str(names[int(counts.argmax())]), float(counts.max() / counts.sum()))


def _weights_of(model: nn.Module, *kinds: type[nn.Module]) -> set[int]:
    return {id(module.weight) for module in model.modules() if isinstance(module, kinds)}


def model_size(model: nn.Module, placements: Placements) -> ModelSize | None:
    """What the FLOPs of a transformer follow from, however it lies; None where its configuration does not say."""
    config: Any = getattr(model, "config", None)
    layers, hidden = getattr(config, "num_hidden_layers", None), getattr(config, "hidden_size", None)
    if layers is None or hidden is None:
        return None
    embeddings = _weights_of(model, nn.Embedding, VocabParallelEmbedding, FeatureParallelEmbedding)
    embeddings -= _weights_of(model, nn.Linear, ColumnParallelLinear)  # tied to a head, whose products do count
    num_parameters = sum(
        prod(placements[name].shape) for name, parameter in model.named_parameters() if id(parameter) not in embeddings
    )
    return ModelSize(num_parameters, layers, hidden)


def total_peak_flops(recipe: Recipe, mesh: ParallelMesh) -> float | None:
    """Dense peak of all ranks together in FLOP/s, or None where it is not known."""
    peak = peak_flops(device_name(mesh.device), recipe.precision)
    return None if peak is None else peak * mesh.world_size


def run_info(
    plan: RunPlan,
    environment: LaunchEnvironment,
    task: Task,
    train: EncodedSplit,
    validation: EncodedSplit | None,
    model: nn.Module,
    placements: Placements,
    mesh: ParallelMesh,
    resumed_from: int | None,
) -> RunInfo:
    """Gathers the facts from their owners."""
    recipe = plan.recipe
    resolved = recipe.model_dump(mode="json")
    return RunInfo(
        name=recipe.name,
        folder=Path(recipe.checkpoint.folder),
        launcher=environment.launcher,
        device=device_name(mesh.device),
        world_size=mesh.world_size,
        layout=str(plan.layout),
        batch=str(plan.batch),
        strategy=recipe.parallel.strategy,
        precision=recipe.precision,
        state_bytes=planned_state_bytes(plan, placements, mesh),
        parameters=_parameter_groups(model, placements, mesh, bytes_per_element=4),  # fp32 master weights
        num_train_rows=len(train),
        num_validation_rows=None if validation is None else len(validation),
        majority=_majority(task, validation),
        steps_per_epoch=plan.steps_per_epoch(len(train)),
        total_steps=plan.total_steps(len(train)),
        versions=_versions(),
        recipe_hash=hashlib.sha256(json.dumps(resolved, sort_keys=True).encode()).hexdigest(),
        recipe=resolved,
        resumed_from=resumed_from,
    )
