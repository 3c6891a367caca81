"""The seam between the loop and the strategies: one whole optimizer step at a time.

It cannot be finer: with pipeline stages the schedule owns the backward pass, and DeepSpeed owns its own step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from trainer.models.statistics import persistent_buffers
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.microbatch import Microbatch, RankBatch
from trainer.parallel.parts import TensorPart, whole_part
from trainer.parallel.placement import Placements

MODEL_PREFIX, OPTIMIZER_PREFIX, BUFFER_PREFIX = "model.", "optimizer.", "buffer."
"""What stands before the name of a parameter or a buffer in `EngineState`."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step was, the same on every rank."""

    loss: float  # over the whole global batch: sum of losses / number of valid labels
    grad_norm: float  # of the whole model, unscaled, before clipping
    learning_rate: float
    loss_scale: float | None = None  # that this step used; fp16 only
    skipped_steps: int | None = None  # so far, this one included; fp16 only

    @property
    def is_finite(self) -> bool:
        """Whether the step could be taken."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def is_bad(self) -> bool:
        """Whether it could not, and no loss scale is to blame: that one lifts the gradient, not the loss."""
        return not self.is_finite and (self.loss_scale is None or not math.isfinite(self.loss))


@dataclass(frozen=True)
class EvalResult:
    """What one microbatch of an evaluation gave on this rank; a filler gives nothing."""

    loss_sum: float
    num_valid: int
    predictions: dict[str, Tensor]  # on the CPU, each [batch, ...], in the order of the microbatch's rows


@dataclass(frozen=True)
class EngineState:
    """What this rank holds of the state of a training, by names of the unsharded model; no copies.

    The fp32 weights are `model.NAME`, the optimizer's tensors `optimizer.NAME.KEY`, buffers that belong to a saved
    model `buffer.NAME`. `scalars` are the same on every rank.
    """

    parts: tuple[TensorPart, ...]
    scalars: Mapping[str, float]


class StateSource(Protocol):
    """A state that was saved under any layout."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of every whole tensor, by its name in `EngineState`."""
        ...

    @property
    def scalars(self) -> Mapping[str, float]:
        """As in `EngineState`."""
        ...

    def fill(self, parts: Iterable[TensorPart]) -> None:
        """Copies what was saved into the boxes of `parts`, and reads nothing else."""
        ...


def optimizer_keys(source: StateSource, name: str) -> list[str]:
    """What the optimizer had for parameter `name`; nothing before the first step."""
    prefix = f"{OPTIMIZER_PREFIX}{name}."
    keys = (full.removeprefix(prefix) for full in source.shapes if full.startswith(prefix))
    return [key for key in keys if "." not in key]


def buffer_parts(models: Iterable[nn.Module], mesh: ParallelMesh) -> list[TensorPart]:
    """The buffers that belong to a saved model, such as running statistics: whole on each rank that has the module."""
    return [
        whole_part(f"{BUFFER_PREFIX}{name}", buffer.detach(), mesh)
        for model in models
        for name, buffer in persistent_buffers(model).items()
    ]


class Engine(Protocol):
    """Holds the model and the optimizer, however they lie over the ranks."""

    @property
    def placements(self) -> Placements:
        """How each parameter lies."""
        ...

    def train_step(self, batch: RankBatch) -> StepResult:
        """Forward, backward, gradient sync, clipping, optimizer and schedule for one global batch.

        Where the loss or the gradient norm is not finite, weights and optimizer are as before the step, which counts
        all the same: the schedule of the learning rate goes on, but for the skips of fp16.

        Raises:
            NonFiniteError: the loss scale of fp16 collapsed.
        """
        ...

    def eval_step(self, microbatch: Microbatch) -> EvalResult:
        """A forward pass without dropout and without gradients."""
        ...

    def idle_share(self) -> float | None:
        """The share of its steps in which this rank waited for other pipeline stages; None without stages."""
        ...

    def held(self) -> dict[str, Tensor]:
        """What this rank holds of each parameter, by its name in the unsharded model; no copies."""
        ...

    def state(self) -> EngineState:
        """What a checkpoint holds, as far as it lies on this rank. No communication."""
        ...

    def load_state(self, source: StateSource, step: int) -> None:
        """Goes on from what was saved after `step` steps, under this layout or another. All ranks must call it."""
        ...

    def export(self, folder: Path) -> None:
        """Writes the model as a plain Hugging Face folder, once, over all ranks."""
        ...
