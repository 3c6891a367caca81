"""Limits of time and memory for a block in a thread, where signals and limits of the process cannot be used.

A watcher raises an error in the thread. Python delivers it between two operations, so one operation may exceed a limit.
"""

from __future__ import annotations

import ctypes
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_INTERVAL_SECONDS = 0.05
_FIRST_SECONDS = 0.1
"""Time of the processor after which memory is compared; it is that of all threads, and most blocks are shorter."""


@dataclass
class _Block:
    """A block that runs: its limits, and the state at its start."""

    seconds: float
    num_bytes: int
    too_slow: type[BaseException]
    start_seconds: float
    start_bytes: int
    error: type[BaseException] | None = None

    def exceeded(self, clock: int) -> type[BaseException] | None:
        """Return the error of the limit that the block exceeds."""
        used = time.clock_gettime(clock) - self.start_seconds
        if used > self.seconds:
            return self.too_slow
        is_large = used > _FIRST_SECONDS and _resident_bytes() - self.start_bytes > self.num_bytes
        return MemoryError if is_large else None


class _Watcher:
    """A thread that looks at the blocks of the present one."""

    def __init__(self) -> None:
        self.block: _Block | None = None
        self.lock, self.begun = threading.Lock(), threading.Event()
        self.clock = time.pthread_getcpuclockid(threading.get_ident())
        watched = threading.current_thread()
        threading.Thread(target=self._watch, args=(watched,), name="templates", daemon=True).start()

    def _watch(self, watched: threading.Thread) -> None:
        while watched.is_alive():
            # Not for ever, so that this thread ends after the watched one.
            self.begun.wait(1)
            time.sleep(_INTERVAL_SECONDS)
            with self.lock:
                if self.block is None:
                    self.begun.clear()
                # One error for each block, since a second one could reach the code behind it.
                elif self.block.error is None and (error := self.block.exceeded(self.clock)) is not None:
                    self.block.error = error
                    # CPython declares an unsigned long, and without a type ctypes passes an int.
                    thread = ctypes.c_ulong(watched.ident or 0)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(error))


_OF_THREAD = threading.local()


@contextmanager
def watched(seconds: float, num_bytes: int, too_slow: type[BaseException]) -> Iterator[None]:
    """End a block of this thread that takes more time of the processor, or more memory.

    Raises:
        MemoryError: the process needs `num_bytes` more than at the start of the block.
        too_slow: the block takes more than `seconds`.
    """
    watcher: _Watcher | None = getattr(_OF_THREAD, "watcher", None)
    if watcher is None:
        watcher = _OF_THREAD.watcher = _Watcher()
    block = _Block(seconds, num_bytes, too_slow, time.clock_gettime(watcher.clock), _resident_bytes())
    with watcher.lock:
        watcher.block = block
    watcher.begun.set()
    try:
        yield
    except BaseException:
        with watcher.lock:
            watcher.block = None
        raise
    # Under the lock, so that no error is sent after the block has ended.
    with watcher.lock:
        watcher.block = None
    while block.error is not None:  # it is on its way
        time.sleep(_INTERVAL_SECONDS)


def _resident_bytes() -> int:
    """Return the memory of this process; 0: the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0
