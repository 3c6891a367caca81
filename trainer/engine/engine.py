"""The interface between the loop and the strategies: one whole optimizer step.

It cannot be finer: a pipeline schedule runs the backward pass, and DeepSpeed runs its own step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor, nn

from trainer.engine.forward import ModelForward, origin_changed
from trainer.engine.optimizers.base import EngineOptimizer
from trainer.engine.precision import is_stored_rounded, narrow_precision, weights_dtype
from trainer.engine.results import EvalResult, StepResult
from trainer.engine.state import EngineState, StateSource, buffer_parts, whole_tensors
from trainer.models.save import save_model
from trainer.parallel.microbatch import Microbatch, RankBatch
from trainer.parallel.placement import Placements
from trainer.parallel.shards.boxes import TensorPart
from trainer.parallel.shards.gathering import laid_out_as, local_part
from trainer.parallel.tensor.kinds import is_start


def nothing() -> None:
    """Do nothing before an update."""


class Engine(ABC):
    """The model and the optimizer, distributed over the ranks.

    Args:
        models: the model, or this rank's pipeline stages, with placed parameters.
        placements: the placement of each parameter, by its name in `models`.
    """

    is_captured = False  # whether CUDA graphs were chosen during the run
    head_notes: Sequence[str] = ()  # for the user, on the logits

    def __init__(
        self,
        forward: ModelForward,
        models: Sequence[nn.Module],
        optimizer: EngineOptimizer,
        placements: Placements,
        total_steps: int,
    ) -> None:
        self.placements = placements
        self.parameters = {name: p for model in models for name, p in model.named_parameters()}
        self.optimizer = optimizer
        self._forward = forward
        self._models = models
        self._mesh = forward.mesh
        self._recipe = forward.plan.recipe
        self._total_steps = total_steps
        self._step = 0
        # bf16 has the exponents of fp32 and needs no scale.
        narrow = narrow_precision(self._recipe.precision)
        self._scaler = None if narrow is None else narrow.scaler(self._mesh.device)

    @abstractmethod
    def begin_step(self, batch: RankBatch, before_update: Callable[[], object] = nothing) -> Callable[[], StepResult]:
        """Run forward, backward, gradient sync, clipping, optimizer and schedule for one global batch.

        The returned function gives the numbers of the step. It may wait for the device, which a caller avoids by
        calling it in `before_update` of the next step.

        With a non-finite loss or gradient norm, weights and optimizer do not change. The step still counts; the
        learning rate's schedule continues, except after a skip of fp16.

        Args:
            before_update: a function that is called once, at the same place on all ranks, before weights change. If
                the engine can, it calls it after the passes, while the device is busy with them.

        Raises:
            NonFiniteError: the loss scale of fp16 fell below 1 in the step before, if that was not read. The returned
                function raises it for its own step.
        """

    def train_step(self, batch: RankBatch) -> StepResult:
        """Begin a step and wait for its numbers."""
        return self.begin_step(batch)()

    def begin_eval(self, microbatch: Microbatch) -> Callable[[], EvalResult]:
        """Begin a forward pass without dropout and gradients, and return a function that waits for its result."""
        self._show()
        return self._forward.begin_eval(microbatch)

    def eval_step(self, microbatch: Microbatch) -> EvalResult:
        """Run a forward pass without dropout and without gradients."""
        return self.begin_eval(microbatch)()

    def begin_answer(self, microbatch: Microbatch) -> Callable[[], dict[str, Tensor]]:
        """Begin a forward pass of rows without labels, and return a function that waits for `answer`."""
        self._show()
        return self._forward.begin_answer(microbatch)

    def answer(self, microbatch: Microbatch) -> dict[str, Tensor]:
        """Return the task's answers for rows without labels: CPU tensors `[batch, ...]`; empty for a filler."""
        return self.begin_answer(microbatch)()

    def idle_share(self) -> float | None:
        """Return the share of time in which this rank waited for other pipeline stages; None without stages."""
        return None

    def notes(self) -> list[str]:
        """Return notes for the user on the head, the optimizer, CUDA graphs and compiled layers."""
        notes = [*self.head_notes, *self.optimizer.notes(self._mesh.device)]
        if self._recipe.cuda_graphs is True:
            time = "for the third time" if self._recipe.compile else "again"
            notes.append(f"each shape of microbatches is captured as a CUDA graph when it comes {time}")
        if self._recipe.compile:
            from trainer.models.compiled import compile_cache

            notes.append(f"layers are compiled after the first microbatch; the code is kept in {compile_cache()}")
        return notes

    @abstractmethod
    def held(self) -> dict[str, Tensor]:
        """Return this rank's part of each parameter, without copies, by its name in the unsharded model."""

    def state(self) -> EngineState:
        """Return this rank's part of a checkpoint; all ranks must call it."""
        self._show()
        for watcher in self._forward.watchers:
            watcher.store()
        # A tied weight has a copy on another stage; a checkpoint holds it once.
        originals = [label for label in self.parameters if not self.placements[label].is_copy]
        return EngineState(
            (*self._parts_of(originals, saved=True), *buffer_parts(self._models, self._mesh)),
            self._scalars(),
            partial(self._parts_of, originals, saved=False),
        )

    def _scalars(self) -> dict[str, float]:
        """Return the numbers of a checkpoint."""
        return {**(self._scaler.state() if self._scaler else {}), **self.optimizer.scalars()}

    def keeps_state(self) -> bool:
        """Return whether the optimizer keeps a state of the parameters that it updates."""
        trained = ((self.parameters[label], p) for label, p in self.placements.items() if p.trainable)
        return any(self.optimizer.state_shapes(parameter, p.shape) for parameter, p in trained)

    @torch.no_grad()
    def load_state(self, source: StateSource, step: int) -> None:
        """Load a state saved after `step` steps under any layout; all ranks must call it.

        Raises:
            ValueError: it is no state of this engine.
        """
        # Checked before tensors are read, so that this refusal changes no weight.
        expected, saved = self._scalars(), source.scalars
        if saved.keys() != expected.keys() or not all(map(isfinite, saved.values())):
            raise ValueError(f"it must have {sorted(expected)} as finite numbers, but has {dict(saved)}")
        self._fill(source)
        source.fill(buffer_parts(self._models, self._mesh))
        if self._scaler:
            self._scaler.load_state(source.scalars)
        self.optimizer.load(source.scalars)  # after the tensors: the saved weights are the shown ones
        self._use_changed_weights()
        # The number of steps keys the dropout masks and gives the learning rate.
        self._step = step

    def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder, which all ranks share; a collective."""
        self._show()
        # Functions, not tensors: weights are gathered one by one while the file is written, so a rank never holds all.
        weights = {label: partial(self._whole_weights, label) for label in self.parameters}
        tensors = whole_tensors(weights, self._models, self.placements, self._mesh)
        adapter, dtype = self._recipe.model.adapter, weights_dtype(self._recipe)
        save_model(self._models[0], folder, tensors, self._mesh, adapter, dtype)

    @abstractmethod
    def _parts(self, label: str) -> Iterator[TensorPart]:
        """Yield the parts of a parameter and of its optimizer state."""

    @abstractmethod
    def _fill(self, source: StateSource) -> None:
        """Read the saved parts of parameters and of the state of the optimizer, which it allocates first."""

    @abstractmethod
    def _whole_weights(self, label: str) -> Tensor:
        """Return a parameter in fp32 without the split over the data ranks; perhaps a collective."""

    def _loaded(self, label: str) -> Tensor:
        """Return a parameter, laid out as it is; a frozen one that is stored rounded has the values of its origin."""
        parameter = self.parameters[label].detach()
        if not is_stored_rounded(self.parameters[label]):
            return parameter
        # Training needs only the rounded weight, but exports and digests must have the bits of the origin.
        rounded = local_part(parameter)
        part = self._forward.read_again(label, parameter.dtype)
        if part is None:
            return parameter
        part = part.to(rounded.device)
        # Somebody may have replaced the origin's file since the start; its rounding proves that it is the same weight.
        if not torch.equal(part.to(rounded.dtype), rounded):
            raise origin_changed(f"{label} is another one there")
        return laid_out_as(part, parameter)

    @abstractmethod
    def _use_changed_weights(self) -> None:
        """Let the next pass use the weights that the optimizer or a checkpoint changed; perhaps a collective."""

    def _is_saved(self, label: str) -> bool:
        return not self._recipe.model.is_partly_frozen or self.parameters[label].requires_grad or is_start(label)

    def _parts_of(self, labels: Iterable[str], saved: bool) -> Iterator[TensorPart]:
        """Yield the parts of those parameters that a checkpoint has, or of those that it leaves out."""
        for label in labels:
            if self._is_saved(label) == saved:
                yield from self._parts(label)

    def _show(self) -> None:
        if self.optimizer.show():
            self._use_changed_weights()

    def _hide(self) -> None:
        if self.optimizer.hide():
            self._use_changed_weights()

    def _learning_rate(self) -> float:
        """Return the learning rate of the next step; skipped steps do not count."""
        # So the schedule of fp16 depends on the scaler, which `begin_step` must settle before this call.
        done = self._step - (self._scaler.skipped_steps if self._scaler else 0)
        return self._recipe.optimizer.learning_rate * self._recipe.schedule.factor(done, self._total_steps)
