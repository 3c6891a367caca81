"""A clock of computation, which leaves out the wait for other stages."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch


class BusyClock:
    """A clock of the seconds in which this rank computes: the host's clock or, on a GPU, CUDA events."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._events: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._is_running = False

    def run(self, work: Callable[[], Any]) -> Any:
        self._is_running = True
        try:
            return self._timed(work, 1)
        finally:
            self._is_running = False

    def leave_out(self, wait: Callable[[], Any]) -> Any:
        """Run `wait`; within `run`, its time does not count."""
        return self._timed(wait, -1) if self._is_running else wait()

    def _timed(self, work: Callable[[], Any], sign: int) -> Any:
        if not self._on_gpu:
            start = time.perf_counter()
            try:
                return work()
            finally:
                self._seconds += sign * (time.perf_counter() - start)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        result = work()
        after.record()
        self._events.append((sign, before, after))
        # Without a wait, so that their number stays small.
        while self._events and self._events[0][2].query():  # type: ignore[no-untyped-call]
            self._count(*self._events.popleft())
        return result

    def _count(self, sign: int, before: torch.cuda.Event, after: torch.cuda.Event) -> None:
        # Events count in milliseconds.
        self._seconds += sign * before.elapsed_time(after) / 1000

    def reset(self) -> None:
        self._seconds = 0.0
        self._events.clear()

    def read(self) -> float:
        """Return all seconds so far, after the device has finished."""
        while self._events:
            self._events[0][2].synchronize()
            self._count(*self._events.popleft())
        return self._seconds
