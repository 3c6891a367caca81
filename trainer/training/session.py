"""The observers of one rank from start to end, and the record of how a run ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from trainer.base.errors import ExitCode, TrainerError
from trainer.checkpoint.counters import Progress
from trainer.checkpoint.owner import FolderOwner
from trainer.checkpoint.saving import Saver
from trainer.checkpoint.store import CheckpointStore
from trainer.observe.builders import ObserverParts, build_observers, registered_observers
from trainer.observe.heartbeat import Heartbeat, forget_statuses
from trainer.observe.observer import Callbacks, Observer, Observers
from trainer.observe.outcome import Outcome
from trainer.observe.records import Compilation, EndRecord, Idling, RunInfo
from trainer.parallel.mesh import ParallelMesh
from trainer.ranks.command import command_line
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.schema import Recipe
from trainer.training.loop import Ending

_ENDINGS: dict[Ending, tuple[ExitCode, str | None]] = {
    "finished": (ExitCode.DONE, None),
    "already_finished": (
        ExitCode.DONE,
        "already finished; nothing to train. To train further, raise the number of steps, or start a run in another"
        " `checkpoint.folder` with this model in `model.name_or_path`",
    ),
    "patience": (ExitCode.DONE, "no better evaluation within `evaluation.patience`"),
    "already_out_of_patience": (
        ExitCode.DONE,
        "already ended: no better evaluation within `evaluation.patience`; nothing to train. To train further, raise"
        " it or set it to null",
    ),
    "stop_at_step": (ExitCode.STOPPED, "`training.stop_at_step` is reached"),
    "signal": (ExitCode.STOPPED, "stopped by a signal"),
    "callback": (ExitCode.STOPPED, "stopped by a callback"),
    "stop_file": (ExitCode.STOPPED, "stopped by the file `stop` in the folder, which is removed"),
}
_OUTCOMES: dict[ExitCode, Literal["finished", "stopped"]] = {ExitCode.DONE: "finished", ExitCode.STOPPED: "stopped"}


def is_complete(ending: Ending) -> bool:
    """Return whether the training is over; a stopped one goes on later."""
    return _ENDINGS[ending][0] == ExitCode.DONE


@dataclass(frozen=True)
class Results:
    """How a training ended, and its results; `ending` is None after an error."""

    ending: Ending | None = None
    model_folder: Path | None = None
    idling: Idling | None = None
    compilation: Compilation | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


_NO_RESULTS = Results()


class Session:
    """The observers of this rank: those of the recipe on rank 0; callbacks, `observer` and registered ones.

    Args:
        observer: an observer of this rank, beside the recipe's.
    """

    def __init__(
        self,
        recipe: Recipe,
        environment: LaunchEnvironment,
        owner: FolderOwner,
        observer: Observer | None,
        callbacks: Callbacks,
    ) -> None:
        self.folder = Path(recipe.checkpoint.folder)
        self.environment = environment
        self.owner = owner
        self._command = command_line(environment)
        self._started = time.monotonic()
        self._saver: Saver | None = None
        shown: list[Observer] = [build_observers(recipe.logging, sys.stdout)] if environment.rank == 0 else []
        self.has_callbacks = bool(callbacks)
        # The observers until now: a note of a callback must not call callbacks again.
        note = Observers(shown).note
        shown += callbacks.observers(environment.rank, note)
        self._outcome = Outcome()
        shown += [self._outcome] if observer is None else [observer, self._outcome]
        self._heartbeat = Heartbeat(self.folder, environment.rank, environment.local_rank)
        parts = ObserverParts(recipe, environment, self._heartbeat, note, partial(self._end, ExitCode.FAILED))
        # Those of features are closed first: the end of the others is no sign of progress for a watchdog.
        self.observers = Observers([*shown, self._heartbeat, *registered_observers(parts)])

    def take_folder(self, mesh: ParallelMesh) -> None:
        """Lock the folder of the run for rank 0. All ranks must call it.

        Raises:
            TrainerError: another run has the folder, or it cannot be written.
        """
        if unprotected := mesh.on_rank_zero(self.owner.take):
            self.observers.note(unprotected)

    def start(self, info: RunInfo, saver: Saver, mesh: ParallelMesh, notes: Sequence[str]) -> None:
        """Report that the run is built, and watch it from now on. All ranks must call it."""
        # By the monotonic clock, because the time of day may be corrected during the start.
        spent = time.monotonic() - self._started

        def start() -> None:
            self.observers.start(replace(info, started=time.time() - spent, start_seconds=spent))
            if mesh.rank == 0:
                forget_statuses(self.folder)

        self._saver = saver
        # On every rank: an error of one rank's callbacks ends all.
        mesh.on_every_rank(start)
        # By now, rank 0 has removed the records of the run before.
        self._heartbeat.begin(saver.progress.step)
        for note in notes:
            self.observers.note(note)

    def finish(self, results: Results) -> EndRecord:
        """Report how the training ended, and return the record."""
        assert results.ending is not None
        code, message = _ENDINGS[results.ending]
        if results.ending == "signal" and self.environment.elastic_nodes is not None:
            message = "stopped by a signal; torchrun starts the ranks again if a node has joined or left"
        return self._end(code, message, results)

    @contextmanager
    def reports_failures(self) -> Iterator[None]:
        """Report an error that leaves the block.

        Raises:
            BaseException: the error itself.
        """
        try:
            yield
        except TrainerError as error:
            self._end(error.exit_code, str(error))
            raise
        except BaseException as error:
            self._end(ExitCode.FAILED, f"{type(error).__name__}: {error}")
            raise

    def _end(self, code: ExitCode, message: str | None, results: Results = _NO_RESULTS) -> EndRecord:
        progress = self._saver.progress if self._saver else Progress()
        rows = tuple(self.observers.finish(progress.step))
        record = EndRecord(
            outcome=_OUTCOMES.get(code, "failed"),
            exit_code=int(code),
            folder=self.folder,
            model_folder=results.model_folder,
            best=progress.best,
            step=progress.step,
            seconds=time.monotonic() - self._started,
            resume_command=self._command,
            message=message,
            warnings=self._outcome.warnings(progress.best) if code == ExitCode.DONE else (),
            pipeline=results.idling,
            compilation=results.compilation,
            has_checkpoint=self._has_checkpoint(),
            rows=rows,
            parts=results.parts,
        )
        self.observers.end(record)
        return record

    def _has_checkpoint(self) -> bool:
        if self._saver is not None:  # the folder of a stalled run may not answer
            return self._saver.has_checkpoint
        try:
            return bool(CheckpointStore(self.folder, keep=1).steps())
        except OSError:  # the folder cannot exist, for example because of its long name
            return False


@contextmanager
def open_session(
    recipe: Recipe, environment: LaunchEnvironment, observer: Observer | None, callbacks: Callbacks
) -> Iterator[Session]:
    """Open the session of a rank; its observers show an error that leaves the block, and are closed at its end."""
    with FolderOwner(Path(recipe.checkpoint.folder)) as owner:
        session = Session(recipe, environment, owner, observer, callbacks)
        # Failures are reported before the observers close.
        with closing(session.observers), session.reports_failures():
            yield session
