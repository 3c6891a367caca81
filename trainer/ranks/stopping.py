"""Signals and files that ask a run to save, or to save and stop, between two steps."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from trainer.base.errors import INTERRUPTED, ExitCode

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # SIGUSR1: Slurm's usual warning before the time limit

SAVE = 1
"""Request for a checkpoint; below the number of every stop signal, so that a stop wins over it."""
STOP = 1000
"""Request by a file for a checkpoint and a stop; above the number of every signal."""

SHOW_CURSOR = b"\x1b[?25h"
_FILES = {STOP: "stop", SAVE: "save"}
_LOOK_SECONDS = 0.25


@contextmanager
def handled(numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call a handler for signals in the block; their earlier handlers return after it."""
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


@contextmanager
def stop_before_training(interrupts: bool = False) -> Iterator[None]:
    """End this process with exit code 75 on SIGTERM and SIGUSR1, until `StopRequest.listen` takes over.

    Nothing is lost before the first step, so a batch system may start the run again. The handler ends the process,
    because libraries catch an exception that comes in the middle of an import.

    Args:
        interrupts: whether SIGINT ends it too, with exit code 130, unless the process was started to ignore it.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        text = f"stopped by {signal.Signals(number).name} before the first step; nothing was lost\n"
        # By the descriptor: the signal may have come in a write to the stream, which then refuses another one.
        os.write(2, b"" if number == signal.SIGINT else text.encode())
        _end_at_once(INTERRUPTED if number == signal.SIGINT else ExitCode.STOPPED)

    numbers = {signal.SIGTERM, signal.SIGUSR1}
    if interrupts and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        numbers.add(signal.SIGINT)
    with handled(numbers, leave):
        yield


def _end_at_once(code: int) -> NoReturn:
    """End this process, and the processes that it has started."""
    with suppress(Exception):  # the signal may have come in a write to the stream, or in the import of psutil
        sys.stdout.flush()
        if os.isatty(1):  # a bar hides it
            os.write(1, SHOW_CURSOR)
    with suppress(Exception):
        import psutil  # not above: signals before the handler is there must find few imports

        for child in psutil.Process().children(recursive=True):
            child.kill()
    os._exit(code)


class StopRequest:
    """Requests to save, or to save and stop, from signals and files.

    Between `listen` and the exit, SIGTERM, SIGINT and SIGUSR1 set `received`; a second SIGINT interrupts at once. The
    loop asks all ranks at each step, so that all stop at the same step. A launcher also sends SIGTERM to the other
    ranks when one rank fails, and they must still show their end.

    After `watch`, rank 0 also looks for files `stop` and `save` in the folder of the run.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.received = 0  # number of the signal, or 0
        self._stack = ExitStack()
        self._folder: Path | None = None
        self._speaks = False
        self._clock = clock
        self._next_look = 0.0
        self._of_file = 0

    def __enter__(self) -> StopRequest:
        return self

    def listen(self, speaks: bool = False) -> None:
        """Install the signal handlers; `speaks`: they answer the first signal with a line on the standard error."""
        self._speaks = speaks
        self._stack.enter_context(handled(STOP_SIGNALS, self._receive))

    def watch(self, folder: Path) -> None:
        """Look for the files in `folder` from now on."""
        self._folder = folder

    def asked(self) -> int:
        """Return the request: `STOP`, the number of a signal, `SAVE` or 0; the largest wins.

        It looks for the files a few times a second at most, however short the steps are.
        """
        if self._folder is not None and self._clock() >= self._next_look:
            self._next_look = self._clock() + _LOOK_SECONDS
            # The table has `stop` first, which wins.
            self._of_file = next((number for number, name in _FILES.items() if (self._folder / name).exists()), 0)
        return max(self.received, self._of_file)

    def wait(self, seconds: float) -> None:
        """Wait until a signal has been received, at most for that time."""
        end = self._clock() + seconds
        while not self.received and self._clock() < end:
            time.sleep(0.05)

    def obeyed(self, *numbers: int) -> None:
        """Remove the files of the requests `numbers`, which are done."""
        if self._folder is not None:
            for number in numbers:
                with suppress(OSError):
                    (self._folder / _FILES[number]).unlink()
            self._next_look = self._of_file = 0

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
        if self._speaks:
            plan = "saving a checkpoint after this step, then stopping"
            if self._folder is None:
                plan = "stopping when the model is built; nothing is lost"
            os.write(2, f"\n{signal.Signals(number).name}: {plan}\n".encode())  # safe inside of a handler
            if os.isatty(1):  # bars hide it, and the launcher may kill this process
                os.write(1, SHOW_CURSOR)
