"""What asks a run to save, or to save and leave, instead of dying in the middle of a step: signals and files."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # SIGUSR1: Slurm's usual warning before the time limit

SAVE = 1
"""Asks for a checkpoint: below the number of every stop signal, so that of both the stop wins."""
STOP = 1000
"""Asks for a checkpoint and to leave, by a file: above the number of every signal."""

_FILES = {STOP: "stop", SAVE: "save"}
_LOOK_SECONDS = 0.25


class StopRequest:
    """From `listen` until it is left, SIGTERM, SIGINT and SIGUSR1 set `received`; a second SIGINT interrupts at once.

    The loop asks all ranks at each step, so that they stop at the same one whichever got the signal. Where a rank
    fails, its launcher sends SIGTERM to the others: they too must come to tell their end.

    From `watch` on, a file `stop` or `save` in the run's folder asks as well; rank 0 alone watches.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.received = 0  # number of the signal, or 0
        self._previous: dict[int, signal._HANDLER] = {}
        self._folder: Path | None = None
        self._clock = clock
        self._next_look = 0.0
        self._found = 0

    def __enter__(self) -> StopRequest:
        return self

    def listen(self) -> None:
        """Takes the signals from whoever had them."""
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._receive)

    def watch(self, folder: Path) -> None:
        """Looks for the files in `folder` from now on."""
        self._folder = folder

    def asked(self) -> int:
        """What this rank is asked for: the number of a signal, `STOP`, `SAVE` or 0. A larger one goes before.

        The file system is asked a few times a second at most, however short the steps are.
        """
        if self._folder is not None and self._clock() >= self._next_look:
            self._next_look = self._clock() + _LOOK_SECONDS
            self._found = next((number for number, name in _FILES.items() if (self._folder / name).exists()), 0)
        return max(self.received, self._found)

    def obeyed(self, *numbers: int) -> None:
        """Removes the files that asked for `numbers`, now that it is done."""
        if self._folder is not None:
            for number in numbers:
                with suppress(OSError):
                    (self._folder / _FILES[number]).unlink()
            self._next_look = self._found = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
