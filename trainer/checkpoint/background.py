"""A write that runs in a thread during the training; the ranks agree on its end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")

WRITTEN, WRITING, FAILED = 0, 1, 2


class Background(Generic[Result]):
    """A function that runs in a thread; `result` or `error` is set at its end."""

    def __init__(self, write: Callable[[], Result]) -> None:
        self.result: Result | None = None
        self.error: Exception | None = None
        self._write = write
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
