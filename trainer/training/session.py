"""The observers of one rank from start to end, and the record of how a run ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from trainer.base.errors import ExitCode, TrainerError
from trainer.checkpoint.counters import Progress
from trainer.checkpoint.saving import Saver
from trainer.checkpoint.store import CheckpointStore
from trainer.observe.builders import build_observers
from trainer.observe.heartbeat import Heartbeat, forget_statuses
from trainer.observe.observer import Observer, Observers
from trainer.observe.profiling import Profiler
from trainer.observe.records import Compilation, EndRecord, Idling, RunInfo
from trainer.observe.watchdog import Watchdog
from trainer.ranks.command import command_line
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.schema import Recipe
from trainer.training.loop import Ending

_ENDINGS: dict[Ending, tuple[ExitCode, str | None]] = {
    "finished": (ExitCode.DONE, None),
    "already_finished": (
        ExitCode.DONE,
        "already finished; nothing to train. To train further, start a run in another `checkpoint.folder` with this"
        " model in `model.name_or_path`; it has a schedule of its own",
    ),
    "patience": (ExitCode.DONE, "no better evaluation within `evaluation.patience`"),
    "already_out_of_patience": (
        ExitCode.DONE,
        "already ended: no better evaluation within `evaluation.patience`; nothing to train. To train further, raise"
        " it or set it to null",
    ),
    "stop_at_step": (ExitCode.STOPPED, "`training.stop_at_step` is reached"),
    "signal": (ExitCode.STOPPED, "stopped by a signal"),
    "stop_file": (ExitCode.STOPPED, "stopped by the file `stop` in the folder, which is removed"),
}
_OUTCOMES: dict[ExitCode, Literal["finished", "stopped"]] = {ExitCode.DONE: "finished", ExitCode.STOPPED: "stopped"}


def is_complete(ending: Ending) -> bool:
    """Return whether the training is over; a stopped one goes on later."""
    return _ENDINGS[ending][0] == ExitCode.DONE


@dataclass
class Session:
    """The observers of this rank and the facts that the end record needs."""

    folder: Path
    observers: Observers
    command: str
    heartbeat: Heartbeat
    watchdog: Watchdog
    started: float = field(default_factory=time.monotonic)
    progress: Progress = field(default_factory=Progress)
    model_folder: Path | None = None
    idling: Idling | None = None
    compilation: Compilation | None = None
    saver: Saver | None = None
    profiler: Profiler | None = None

    def start(self, info: RunInfo) -> None:
        """Tell the observers that the run is built."""
        self.observers.start(info)
        forget_statuses(self.folder)

    def begin_steps(self) -> None:
        """Start the heartbeat and the watchdog."""
        self.heartbeat.begin(self.folder, self.progress.step)
        self.watchdog.begin()

    @contextmanager
    def reports_failures(self) -> Iterator[None]:
        """Tell the observers of an error that leaves the block.

        Raises:
            BaseException: the error itself.
        """
        try:
            yield
        except TrainerError as error:
            self.end(error.exit_code, str(error))
            raise
        except BaseException as error:
            self.end(ExitCode.FAILED, f"{type(error).__name__}: {error}")
            raise

    def ended(self, ending: Ending, elastic: bool = False) -> EndRecord:
        """Tell the observers how the loop ended, and return the record; `elastic`: nodes may join and leave."""
        code, message = _ENDINGS[ending]
        if ending == "signal" and elastic:
            message = "stopped by a signal; torchrun starts the ranks again if a node has joined or left"
        return self.end(code, message)

    def end(self, code: ExitCode, message: str | None) -> EndRecord:
        """Tell the observers how the run ended, and return the record."""
        if self.profiler is not None:
            self.profiler.finish(self.progress.step)
        record = EndRecord(
            outcome=_OUTCOMES.get(code, "failed"),
            exit_code=int(code),
            folder=self.folder,
            model_folder=self.model_folder,
            best=self.progress.best,
            step=self.progress.step,
            seconds=time.monotonic() - self.started,
            resume_command=self.command,
            message=message,
            pipeline=self.idling,
            compilation=self.compilation,
            has_checkpoint=self._has_checkpoint(),
            profile=self.profiler.found if self.profiler else None,
        )
        self.observers.end(record)
        return record

    def _has_checkpoint(self) -> bool:
        if self.saver is not None:  # the folder of a stalled run may not answer
            return self.saver.has_checkpoint
        try:
            return bool(CheckpointStore(self.folder, keep=1).steps())
        except OSError:  # the folder cannot exist, for example because of its long name
            return False


def open_session(recipe: Recipe, environment: LaunchEnvironment, observer: Observer | None = None) -> Session:
    """Build the observers: those of the user on rank 0; `observer`, heartbeat and watchdog on every rank."""
    heartbeat = Heartbeat(environment.rank, environment.local_rank)
    seconds = recipe.parallel.stall_timeout.seconds
    watchdog = Watchdog(heartbeat, seconds, environment.error_file, lambda reason: session.end(ExitCode.FAILED, reason))
    shown: list[Observer] = [build_observers(recipe.logging, sys.stdout)] if environment.rank == 0 else []
    shown += [] if observer is None else [observer]
    profiler: Profiler | None = None
    if recipe.logging.profile is not None:
        first, last = recipe.logging.profile.steps
        folder = Path(recipe.checkpoint.folder) / "profile"
        profiler = Profiler((first, last), environment.rank, folder, Observers(shown).note)
        shown.insert(0, profiler)
    # The watchdog is closed first: the end of the others is no sign of progress.
    observers = Observers([*shown, heartbeat, watchdog])
    session = Session(Path(recipe.checkpoint.folder), observers, command_line(environment), heartbeat, watchdog)
    session.profiler = profiler
    return session
