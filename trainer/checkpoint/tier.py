"""The tiers of a run's checkpoints: the places that hold them, and the questions that `Saver` asks each one."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import Tensor

from trainer.checkpoint.format import Facts
from trainer.engine.engine import Engine
from trainer.engine.state import EngineState
from trainer.parallel.mesh import ParallelMesh
from trainer.recipe.schema.fields import Interval

if TYPE_CHECKING:
    from trainer.checkpoint.reading import SavedBoxes

Result = TypeVar("Result")
Snapshot = Callable[[], tuple[Facts, Mapping[str, Tensor]]]
"""Copies this rank's part of the state. All ranks must call it."""

# The largest of all ranks counts: one failure at once, then one unfinished share.
WRITTEN, WRITING, FAILED = 0, 1, 2


@dataclass(frozen=True)
class Found:
    """A complete checkpoint in a tier; `name` is for messages."""

    step: int
    name: str


class Tier:
    """A place of checkpoints. All ranks must call each method; those of this class do nothing."""

    is_lasting = True
    """Whether its checkpoints are the run's own; others may be lost, and are freed at the end."""
    last: int | None = None
    """The step of the newest checkpoint that this run has loaded or completed here."""
    every: Interval | None = None
    """How often it gets a checkpoint of its own, between those of the run; None: never."""
    destination = ""
    """The place to which `deliver` uploads, as the user may see it; empty: it uploads nothing."""

    def open(self, resumes: bool) -> list[str]:
        """Make the place ready, and return notes for the user; `resumes`: whether the run may resume."""
        return []

    def checkpoints(self) -> Sequence[Found]:
        """Return the complete checkpoints, in order of preference where steps are equal."""
        return ()

    def read(self, checkpoint: Any) -> tuple[SavedBoxes | None, list[str]]:
        """Verify a checkpoint, and return its state with the problems of its parts; None: it is damaged."""
        raise NotImplementedError

    def load(self, state: Any, engine: Engine) -> None:
        """Load a state that `read` has returned into the engine."""
        step = state.facts.progress.step
        engine.load_state(state, step)
        self.last = step

    def begin(self, step: int | None, state: Callable[[], EngineState]) -> list[str]:
        """Prepare for saving, and return notes for the user.

        Args:
            step: the step from which the run resumes; None: it starts from the beginning.
            state: returns the state of the engine; all ranks must call it.
        """
        return []

    def save(self, step: int, snapshot: Snapshot) -> None:
        """Start to write a checkpoint, after the previous one is complete."""

    def begin_poll(self) -> Callable[[], None]:
        """Start to compare the status of all ranks; return a function that completes a written checkpoint."""
        return _nothing

    def finish(self) -> None:
        """Wait until the current checkpoint is complete."""

    def close(self) -> None:
        """Free a place that does not last, at the end of a run, after `finish`."""

    def deliver(self, model: Path | None) -> None:
        """Wait for copies of checkpoints, and copy the final model."""


class Background(Generic[Result]):
    """A function that runs in a thread; `result` or `error` is set at its end."""

    def __init__(self, write: Callable[[], Result]) -> None:
        self.result: Result | None = None
        self.error: Exception | None = None
        self._write = write
        # A daemon, because a disk that hangs must not keep the process from its end.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._write()
        except Exception as error:
            self.error = error  # all ranks report it at the next step

    @property
    def status(self) -> int:
        """`WRITTEN`, `WRITING` or `FAILED`; ranks agree on the largest."""
        if self._thread.is_alive():
            return WRITING
        return FAILED if self.error else WRITTEN

    def wait(self, seconds: float | None = None) -> None:
        """Wait for the end of the thread, for some seconds at most."""
        self._thread.join(seconds)


class WritingTier(Tier, Generic[Result]):
    """A tier to which each rank writes its share in a thread during the training; the ranks agree on the end."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._writing: tuple[Facts, Background[Result]] | None = None

    def begin_poll(self) -> Callable[[], None]:
        """See `Tier`. Call it before a step, and the function after it; then no rank waits."""
        # All ranks save and settle together, so either all return here or none.
        if self._writing is None:
            return _nothing
        answer = self._mesh.begin_agree_max(self._writing[1].status)

        def settle() -> None:
            # The answer is the same on all ranks, so all complete or fail the checkpoint together.
            if (status := answer()) != WRITING:
                self._settle(status)

        return settle

    def finish(self) -> None:
        if self._writing is not None:
            self._writing[1].wait()
            self._settle(self._mesh.agree_max(self._writing[1].status))

    def _settle(self, status: int) -> None:
        assert self._writing is not None
        # First, so that after an error nobody completes this checkpoint again.
        (facts, writing), self._writing = self._writing, None
        if status == FAILED:
            self._fail(facts.progress.step, writing)
        else:
            self._complete(facts, writing)
            self.last = facts.progress.step

    @abstractmethod
    def _complete(self, facts: Facts, writing: Background[Result]) -> None:
        """Complete a checkpoint that all ranks have written."""

    @abstractmethod
    def _fail(self, step: int, writing: Background[Result]) -> None:
        """Clean up after a checkpoint that a rank could not write."""


def gather_shapes(mesh: ParallelMesh, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of all ranks on rank 0, and nothing on the others. All ranks must call it."""
    distinct = mesh.gather_distinct(dict(shapes))  # equal shapes are sent once
    return {name: tuple(shape) for some in distinct or [] for name, shape in some.items()}


def _nothing() -> None:
    pass
