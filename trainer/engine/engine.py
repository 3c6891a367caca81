"""The interface between the loop and the strategies: one whole optimizer step.

It cannot be finer: a pipeline schedule runs the backward pass, and DeepSpeed runs its own step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from trainer.models.statistics import persistent_buffers
from trainer.parallel.copying import begin_to_host
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.microbatch import Microbatch, RankBatch
from trainer.parallel.placement import ParameterPlacement, Placements
from trainer.parallel.shards.boxes import TensorPart, whole_part
from trainer.parallel.shards.gathering import WholeTensors, join_whole

MODEL_PREFIX, OPTIMIZER_PREFIX, BUFFER_PREFIX = "model.", "optimizer.", "buffer."
"""Prefixes of the names of parameters, optimizer tensors and buffers in `EngineState`."""


def nothing() -> None:
    """Do nothing before an update."""


@dataclass(frozen=True)
class StepResult:
    """The numbers of one optimizer step, equal on all ranks."""

    loss: float  # over the whole global batch: sum of losses / number of valid labels
    grad_norm: float  # of the whole model, unscaled, before clipping
    learning_rate: float
    loss_scale: float | None = None  # that this step used; fp16 only
    skipped_steps: int | None = None  # so far, this one included; fp16 only

    @property
    def is_finite(self) -> bool:
        """Whether loss and norm are finite, so the step was taken."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def is_bad(self) -> bool:
        """Whether the step is non-finite, and not from an fp16 overflow, which leaves the loss finite."""
        return not self.is_finite and (self.loss_scale is None or not math.isfinite(self.loss))


@dataclass(frozen=True)
class EvalResult:
    """This rank's result of one microbatch of an evaluation; empty for a filler."""

    loss_sum: float
    num_valid: int
    predictions: dict[str, Tensor]  # on the CPU, each [batch, ...], in the order of the microbatch's rows

    @classmethod
    def begin_read(
        cls, loss_sum: Tensor | None, num_valid: int, predictions: Mapping[str, Tensor]
    ) -> Callable[[], EvalResult]:
        """Begin to copy the tensors of a result to the host, and return a function that waits for them."""
        read_loss = begin_to_host({} if loss_sum is None else {"loss_sum": loss_sum})
        read = begin_to_host(predictions)
        return lambda: cls(sum(loss.item() for loss in read_loss().values()), num_valid, read())


@dataclass(frozen=True)
class EngineState:
    """This rank's part of the training state, without copies, by the names of the unsharded model.

    Names are `model.NAME` for weights, `optimizer.NAME.KEY` for tensors of the optimizer, and `buffer.NAME` for
    saved buffers. `scalars` are equal on all ranks. `frozen` are weights that a checkpoint leaves out, because the
    model below an adapter is loaded again.
    """

    parts: tuple[TensorPart, ...]
    scalars: Mapping[str, float]
    frozen: tuple[TensorPart, ...] = ()


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


def optimizer_keys(source: StateSource, name: str) -> list[str]:
    """Return the keys of the optimizer's tensors for parameter `name`; empty before the first step."""
    prefix = f"{OPTIMIZER_PREFIX}{name}."
    keys = (full.removeprefix(prefix) for full in source.shapes if full.startswith(prefix))
    return [key for key in keys if "." not in key]


def buffer_parts(models: Iterable[nn.Module], mesh: ParallelMesh) -> list[TensorPart]:
    """Return the saved buffers, such as running statistics; each is whole on all ranks with its module."""
    return [
        whole_part(f"{BUFFER_PREFIX}{name}", buffer.detach(), mesh)
        for model in models
        for name, buffer in persistent_buffers(model).items()
    ]


def whole_tensors(
    weights: Mapping[str, Callable[[], Tensor]],
    models: Iterable[nn.Module],
    placements: Placements,
    mesh: ParallelMesh,
) -> WholeTensors:
    """Return the weights and saved buffers of a model for its export. All ranks must call it.

    Args:
        weights: for each parameter of this rank, by its key in `placements`, a function that returns it in fp32, whole
            but for the split over tensor ranks. Copies of tied weights on other stages are left out.
        models: the model, or this rank's stages of it.
        placements: the placements of all parameters.
        mesh: the ranks.
    """
    joins: dict[str, Callable[[], Tensor]] = {}
    like: dict[str, Tensor] = {}
    for label, read in weights.items():
        placement = placements[label]
        if not placement.is_copy:
            joins[placement.name] = partial(_joined, read, placement, mesh)
            like[placement.name] = torch.empty(placement.shape, device="meta")
    for model in models:
        for name, buffer in persistent_buffers(model).items():
            joins[name] = partial(Tensor.detach, buffer)
            like[name] = buffer.to("meta")
    return WholeTensors(joins, like, mesh)


def _joined(read: Callable[[], Tensor], placement: ParameterPlacement, mesh: ParallelMesh) -> Tensor:
    return join_whole(read(), placement, mesh)


class Engine(Protocol):
    """The model and the optimizer, distributed over the ranks."""

    @property
    def placements(self) -> Placements:
        """The placement of each parameter."""
        ...

    def begin_step(self, batch: RankBatch, before_update: Callable[[], object] = nothing) -> Callable[[], StepResult]:
        """Run forward, backward, gradient sync, clipping, optimizer and schedule for one global batch.

        The returned function gives the numbers of the step. It may wait for the device, which a caller avoids by
        calling it in `before_update` of the next step.

        With a non-finite loss or gradient norm, weights and optimizer do not change. The step still counts; the
        learning rate's schedule continues, except after a skip of fp16.

        Args:
            batch: this rank's part of the global batch.
            before_update: a function that is called once, at the same place on all ranks, before weights change. If
                the engine can, it calls it after the passes, while the device is busy with them.

        Raises:
            NonFiniteError: the loss scale of fp16 fell below 1 in the step before, if that was not read. The returned
                function raises it for its own step.
        """
        ...

    def train_step(self, batch: RankBatch) -> StepResult:
        """Begin a step and wait for its numbers."""
        ...

    def begin_eval(self, microbatch: Microbatch) -> Callable[[], EvalResult]:
        """Begin a forward pass without dropout and gradients, and return a function that waits for its result."""
        ...

    def eval_step(self, microbatch: Microbatch) -> EvalResult:
        """Run a forward pass without dropout and without gradients."""
        ...

    def begin_answer(self, microbatch: Microbatch) -> Callable[[], dict[str, Tensor]]:
        """Begin a forward pass of rows without labels, and return a function that waits for `answer`."""
        ...

    def answer(self, microbatch: Microbatch) -> dict[str, Tensor]:
        """Return the task's answers for rows without labels: CPU tensors `[batch, ...]`; empty for a filler."""
        ...

    def idle_share(self) -> float | None:
        """Return the share of time in which this rank waited for other pipeline stages; None without stages."""
        ...

    def held(self) -> dict[str, Tensor]:
        """Return this rank's part of each parameter, without copies, by its name in the unsharded model."""
        ...

    def state(self) -> EngineState:
        """Return this rank's part of a checkpoint; all ranks must call it."""
        ...

    def load_state(self, source: StateSource, step: int) -> None:
        """Load a state saved after `step` steps under any layout; all ranks must call it."""
        ...

    def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder, which all ranks share; a collective."""
        ...
