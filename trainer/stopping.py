"""Signals that ask a run to save and leave, instead of dying in the middle of a step."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # SIGUSR1: Slurm's usual warning before the time limit


class StopRequest:
    """From `listen` until it is left, SIGTERM, SIGINT and SIGUSR1 set `received`; a second SIGINT interrupts at once.

    The loop asks all ranks at each step, so that they stop at the same one whichever got the signal. Where a rank
    fails, its launcher sends SIGTERM to the others: they too must come to tell their end.
    """

    def __init__(self) -> None:
        self.received = 0  # number of the signal, or 0
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> StopRequest:
        return self

    def listen(self) -> None:
        """Takes the signals from whoever had them."""
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._receive)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
