"""The training state of a rank, by the names of the unsharded model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from trainer.models.statistics import persistent_buffers
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.placement import ParameterPlacement, Placements
from trainer.parallel.shards.boxes import TensorPart, whole_part
from trainer.parallel.shards.gathering import WholeTensors, join_whole

MODEL_PREFIX, OPTIMIZER_PREFIX, BUFFER_PREFIX = "model.", "optimizer.", "buffer."
"""Prefixes of the names of parameters, optimizer tensors and buffers in `EngineState`."""


@dataclass(frozen=True)
class EngineState:
    """This rank's part of the training state, without copies, by the names of the unsharded model.

    Names are `model.NAME` for weights, `optimizer.NAME.KEY` for tensors of the optimizer, and `buffer.NAME` for
    saved buffers. `scalars` are equal on all ranks. `frozen` yields weights that a checkpoint leaves out, because the
    model below an adapter is loaded again.
    """

    parts: tuple[TensorPart, ...]
    scalars: Mapping[str, float]
    frozen: Callable[[], Iterable[TensorPart]] = tuple


class StateSource(Protocol):
    """A saved state of any layout."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each whole tensor, by its name in `EngineState`."""
        ...

    @property
    def scalars(self) -> Mapping[str, float]:
        """As in `EngineState`."""
        ...

    def fill(self, parts: Iterable[TensorPart]) -> None:
        """Read the saved elements of `parts` into their boxes, and no others."""
        ...


def optimizer_shapes(source: StateSource) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of the saved tensors of the optimizer, by the name of their parameter and by key."""
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for full, shape in source.shapes.items():
        if full.startswith(OPTIMIZER_PREFIX):
            # From the right: names of parameters contain dots, keys of an optimizer's state do not.
            name, _, key = full.removeprefix(OPTIMIZER_PREFIX).rpartition(".")
            shapes.setdefault(name, {})[key] = shape
    return shapes


def buffer_parts(models: Iterable[nn.Module], mesh: ParallelMesh) -> list[TensorPart]:
    """Return the saved buffers, such as running statistics; each is whole on all ranks with its module."""
    return [
        whole_part(f"{BUFFER_PREFIX}{name}", buffer.detach(), mesh)
        for model in models
        for name, buffer in persistent_buffers(model).items()
    ]


def whole_tensors(
    weights: Mapping[str, Callable[[], Tensor]], models: Iterable[nn.Module], placements: Placements, mesh: ParallelMesh
) -> WholeTensors:
    """Return the weights and saved buffers of a model for its export. All ranks must call it.

    Args:
        weights: for each parameter of this rank, by its key in `placements`, a function that returns it in fp32, whole
            but for the split over tensor ranks. Copies of tied weights on other stages are left out.
    """

    def joined(read: Callable[[], Tensor], placement: ParameterPlacement) -> Tensor:
        return join_whole(read(), placement, mesh)

    joins: dict[str, Callable[[], Tensor]] = {}
    like: dict[str, Tensor] = {}
    for label, read in weights.items():
        placement = placements[label]
        if not placement.is_copy:
            # A function, so that `WholeTensors` gathers one tensor at a time, in one order on all ranks.
            joins[placement.name] = partial(joined, read, placement)
            # Shapes are known without a gather: the writer sizes its files first.
            like[placement.name] = torch.empty(placement.shape, device="meta")
    for model in models:
        for name, buffer in persistent_buffers(model).items():
            joins[name] = partial(Tensor.detach, buffer)
            like[name] = buffer.to("meta")
    return WholeTensors(joins, like, mesh)
