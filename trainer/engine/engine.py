"""The interface between the loop and the strategies: one whole optimizer step.

It cannot be finer: a pipeline schedule runs the backward pass, and DeepSpeed runs its own step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from torch import Tensor

from trainer.engine.results import EvalResult, StepResult
from trainer.engine.state import EngineState, StateSource
from trainer.parallel.microbatch import Microbatch, RankBatch
from trainer.parallel.placement import Placements


def nothing() -> None:
    """Do nothing before an update."""


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
