"""The run of one trial: `trainer run` in a process group of its own, watched by its metrics file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.base.errors import UsageError, storage_error
from trainer.base.processes import child_variables
from trainer.observe.metrics_file import METRICS_FILE_NAME
from trainer.observe.records import EvaluationRecord
from trainer.tools.compare.turns import first_line
from trainer.tools.run_metrics import Metrics, read_metrics

OUTPUT = "output.txt"
_LOOK_SECONDS = 0.3
_PAUSE = 20  # times the seconds of reading, since it reads all lines of the run
_END_BYTES = 4096  # of an output, which hold the error


@dataclass(frozen=True)
class TrialRun:
    """A recipe with overrides, its run folder, the number of ranks, and the GPUs that they see; empty: all."""

    recipe: str
    words: Sequence[str]
    folder: Path
    processes: int
    gpus: Sequence[str] = ()

    def train(self, asked: Callable[[], int], is_poor: Callable[[EvaluationRecord], bool]) -> int | None:
        """Train until the end, and return the exit code; None if an evaluation was poor.

        A run that stands half-way goes on. A stop lets it save a checkpoint.

        Args:
            asked: the signal for the run: 0, SIGTERM to save and stop, or SIGKILL.
            is_poor: receives each new evaluation; whether the run is pruned.

        Raises:
            UsageError: the folder cannot be written.
        """
        # A program of its own, so that a pruned run can be killed with all its ranks.
        command = [sys.executable, "-m", "trainer", "run", self.recipe, *self.words]
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / OUTPUT).open("wb") as output:
                child = subprocess.Popen(
                    [*command, f"checkpoint.folder={self.folder.resolve()}", "--processes", str(self.processes)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**child_variables(), **gpus},
                    start_new_session=True,  # Ctrl-C reaches the search alone, which forwards it
                )
        except OSError as error:
            raise storage_error(f"{self.folder} cannot be written ({error.strerror}); name another", error) from error
        return self._watch(child, asked, is_poor)

    def _watch(
        self,
        child: subprocess.Popen[bytes],
        asked: Callable[[], int],
        is_poor: Callable[[EvaluationRecord], bool],
    ) -> int | None:
        seen, sent, size, rested = 0, 0, -1, 0.0
        try:
            while True:
                code = child.poll()
                begun = time.monotonic()
                # The file is read only if it has grown, and before the run's end not too often.
                if (begun >= rested or code is not None) and (now := self._size()) != size:
                    size, found = now, self.metrics().evaluations
                    rested = time.monotonic() + _PAUSE * (time.monotonic() - begun)
                    for record in found[seen:]:
                        if is_poor(record) and code is None:
                            return None
                    seen = len(found)
                if code is not None:
                    return code
                if (wanted := asked()) != sent:
                    sent = wanted
                    child.send_signal(wanted)
                time.sleep(_LOOK_SECONDS)
        finally:
            with suppress(ProcessLookupError):  # ranks that outlive their parent, and those of a run that is pruned
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()

    def metrics(self) -> Metrics:
        """Return the records of the run so far."""
        try:
            return read_metrics(self.folder / METRICS_FILE_NAME)
        except (OSError, UsageError):  # it has not begun
            return Metrics()

    def reason(self) -> str:
        """Return the error at the end of the output."""
        try:
            with (self.folder / OUTPUT).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _END_BYTES))
                lines = file.read().decode(errors="replace").strip().splitlines()
        except OSError as error:
            return str(error)
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return first_line("\n".join(errors or lines[-1:])) or "it left no message"

    def _size(self) -> int:
        try:
            return (self.folder / METRICS_FILE_NAME).stat().st_size
        except OSError:
            return 0
