"""The facts of a run for its start-up summary and the first line of `metrics.jsonl`."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from math import isfinite, prod
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import nn

from trainer.base.distribution import versions
from trainer.data.split import EncodedSplit
from trainer.engine.optimizers.parameters import TrainedParameters
from trainer.engine.optimizers.table import build_optimizer
from trainer.observe.meter import ModelSize, peak_flops
from trainer.observe.records import Kind, MajorityClass, ParameterGroup, RunInfo
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.placement import ParameterPlacement, Placements
from trainer.parallel.state_bytes import StateBytes, state_bytes
from trainer.parallel.stored_in_parts import sizes_of_parts
from trainer.parallel.tensor.kinds import ShardedEmbedding, ShardedLinear
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.drawing import layout_table
from trainer.recipe.plan import RunPlan
from trainer.recipe.schema import Recipe
from trainer.tasks.task import Task
from trainer.training.data_notes import class_counts
from trainer.training.run_data import PreparedData


def device_name(device: torch.device) -> str:
    """Return the vendor's name of a GPU, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _own_parameter_groups(
    models: Sequence[nn.Module], placements: Placements, mesh: ParallelMesh
) -> tuple[ParameterGroup, ...]:
    names = Counter(id(p) for model in models for _, p in model.named_parameters(remove_duplicate=False))
    tied = {name for model in models for name, p in model.named_parameters() if names[id(p)] > 1}
    weight_bytes, sizes = _weight_bytes(models), mesh.sizes
    quantized = sizes_of_parts(models)
    groups = []
    for name in get_args(Kind):
        labels = [label for label, placement in placements.items() if name in _kinds(placement, label in tied)]
        # A copy on another stage takes memory there, but is no further parameter.
        members = {label: placements[label] for label in labels if not placements[label].is_copy}
        if labels:
            groups.append(
                ParameterGroup(
                    placement=name,
                    # The scales of a quantised weight stand for 0 of its elements, and are no tensors of the model.
                    num_tensors=sum(quantized.get(label) != 0 for label in members),
                    num_parameters=sum(quantized.get(label, prod(p.shape)) for label, p in members.items()),
                    bytes_per_rank=sum(placements[label].num_elements(sizes) * weight_bytes(label) for label in labels),
                )
            )
    return tuple(groups)


def _kinds(placement: ParameterPlacement, is_tied: bool) -> Iterator[Kind]:
    # One of the first three, and "tied" beside it, so the kinds overlap.
    yield "frozen" if not placement.trainable else "split" if placement.splits else "replicated"
    if is_tied or placement.stages:
        yield "tied"


def _weight_bytes(models: Iterable[nn.Module]) -> Callable[[str], int]:
    """Return a function from the name of a parameter to the bytes of each of its elements."""
    sizes = {name: p.dtype.itemsize for model in models for name, p in model.named_parameters()}
    return sizes.__getitem__


def _parameter_groups(of_stage: tuple[ParameterGroup, ...], mesh: ParallelMesh) -> tuple[ParameterGroup, ...]:
    """Return the groups of all pipeline stages together, with the bytes of the largest stage, on rank 0."""
    if mesh.size("pp") == 1:
        return of_stage
    gathered = mesh.gather([asdict(group) for group in of_stage] if mesh.is_first_replica else [])
    by_kind: dict[str, list[ParameterGroup]] = {}
    for group in (ParameterGroup(**values) for groups in gathered or [] for values in groups):
        by_kind.setdefault(group.placement, []).append(group)
    return tuple(
        ParameterGroup(
            placement=name,
            num_tensors=sum(group.num_tensors for group in by_kind[name]),
            num_parameters=sum(group.num_parameters for group in by_kind[name]),
            # Sums over stages give the whole model; bytes are those of the fullest rank.
            bytes_per_rank=max(group.bytes_per_rank for group in by_kind[name]),
        )
        for name in get_args(Kind)
        if name in by_kind
    )


def planned_state_bytes(
    plan: RunPlan, models: Iterable[nn.Module], placements: Placements, mesh: ParallelMesh
) -> StateBytes:
    """Return the bytes of the training state on the rank that holds the most, by formula. All ranks must call it."""
    models = list(models)
    recipe, strategy = plan.recipe, plan.strategy
    trained = TrainedParameters.of(models, recipe, placements, mesh)
    optimizer = build_optimizer(recipe.optimizer, trained)
    master_bytes = 4 if strategy.package else 0  # a copy beside the parameters, in fp32 too
    sizes = state_bytes(
        placements,
        mesh.sizes,
        cut_gradients=strategy.cuts_gradients,
        cut_optimizer=strategy.cuts_optimizer,
        weight_bytes=_weight_bytes(models),
        optimizer_bytes=lambda name, number: (
            optimizer.state_bytes(trained.named[name], placements[name].shape, number) + master_bytes * number
        ),
    )
    gathered = mesh.gather(asdict(sizes)) if mesh.size("pp") > 1 else None
    return max((StateBytes(**values) for values in gathered), key=lambda stage: stage.total) if gathered else sizes


def _majority(task: Task, split: EncodedSplit | None) -> MajorityClass | None:
    names = task.model_options().get("id2label")
    if split is None or names is None or "labels" not in split.scalars:
        return None
    counts = np.bincount(split.scalars["labels"])
    return MajorityClass(str(names[int(counts.argmax())]), float(counts.max() / counts.sum()))


def _baselines(data: PreparedData, models: Sequence[nn.Module]) -> dict[str, float]:
    task, split = data.task, data.validation
    labels = None if split is None or "labels" not in split.scalars else torch.tensor(split.scalars["labels"])
    config = getattr(models[0], "config", None)
    baselines = task.baselines(labels, getattr(config, "vocab_size", None))
    if data.evaluated is not None:
        baselines |= task.split_baselines(data.evaluated)
    return {name: value for name, value in baselines.items() if isfinite(value)}  # a constant has no correlation


def _weights_of(models: Sequence[nn.Module], *kinds: type[nn.Module]) -> set[int]:
    return {id(module.weight) for model in models for module in model.modules() if isinstance(module, kinds)}


def model_size(models: Sequence[nn.Module], placements: Placements, mesh: ParallelMesh) -> ModelSize | None:
    """Return the sizes that give the FLOPs of a transformer; None if its configuration lacks them."""
    config: Any = getattr(models[0], "config", None)
    layers, hidden = getattr(config, "num_hidden_layers", None), getattr(config, "hidden_size", None)
    if layers is None or hidden is None:
        return None
    embeddings = _weights_of(models, nn.Embedding, ShardedEmbedding)
    # An embedding that is tied to a head counts, because of the head's products.
    embeddings -= _weights_of(models, nn.Linear, ShardedLinear)
    quantized = sizes_of_parts(models)
    counted = [
        (quantized.get(name, prod(placements[name].shape)), parameter.requires_grad)
        for model in models
        for name, parameter in model.named_parameters()
        if id(parameter) not in embeddings
    ]
    # Over the stages only: all ranks of the other axes have the sizes of whole parameters.
    sizes = [sum(size for size, _ in counted), sum(size for size, trained in counted if not trained)]
    total, frozen = mesh.sum_(torch.tensor(sizes, device=mesh.device), "pp").tolist()
    return ModelSize(total, layers, hidden, frozen)


def total_peak_flops(recipe: Recipe, mesh: ParallelMesh) -> float | None:
    """Return the dense peak of all ranks together in FLOP/s; None if it is unknown."""
    if recipe.tf32 and recipe.precision == "fp32":
        return None  # the table has peaks without TF32
    peak = peak_flops(device_name(mesh.device), recipe.precision)
    return None if peak is None else peak * mesh.world_size


def run_info(
    plan: RunPlan,
    environment: LaunchEnvironment,
    data: PreparedData,
    models: Sequence[nn.Module],
    placements: Placements,
    mesh: ParallelMesh,
) -> RunInfo:
    """Collect the facts of a run from its first step on, without texts on its stages. All ranks must call it.

    Facts of other pipeline stages reach rank 0 only.
    """
    recipe, task, train, validation = plan.recipe, data.task, data.train, data.validation
    resolved = recipe.model_dump(mode="json")
    return RunInfo(
        name=recipe.name,
        folder=Path(recipe.checkpoint.folder),
        launcher=environment.launcher,
        device=device_name(mesh.device),
        world_size=mesh.world_size,
        layout=str(plan.layout),
        ranks=tuple(layout_table(plan)[0]),
        batch=str(plan.batch),
        strategy=recipe.parallel.strategy,
        precision=recipe.precision,
        state_bytes=planned_state_bytes(plan, models, placements, mesh),
        parameters=_parameter_groups(_own_parameter_groups(models, placements, mesh), mesh),
        num_train_rows=data.num_train_rows,
        num_validation_rows=None if validation is None else len(validation),
        unit=data.unit,
        majority=_majority(task, validation),
        baselines=_baselines(data, models),
        classes=class_counts(task, train) if data.opened is None else (),
        positive=task.positive_class,
        steps_per_epoch=plan.steps_per_epoch(data.num_train_rows),
        total_steps=plan.total_steps(data.num_train_rows),
        versions=versions(),
        recipe_hash=hashlib.sha256(json.dumps(resolved, sort_keys=True).encode()).hexdigest(),
        recipe=resolved,
    )
