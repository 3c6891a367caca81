"""Trainings that alternate in one process in blocks of steps: other load on the machine affects them equally."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from trainer.parallel.microbatch import RankBatch


@dataclass(frozen=True)
class Cost:
    """The elapsed time and the CPU time of a block of steps in this process.

    Other programs increase the elapsed time, but hardly the CPU time. Only the elapsed time includes waiting.
    """

    seconds: float
    cpu_seconds: float


Training = Callable[[Iterable[RankBatch]], object]
"""A function that takes one optimizer step on each of the given batches."""


class Contestant:
    """A training in its own thread, which sleeps between its blocks of steps.

    The iterator of batches pauses and times the training, so its loop runs unchanged. The time of a block begins before
    its first batch is prepared, and ends when the training requests the batch after its last.

    Args:
        name: The name in the report.
        train: The training.
        batches: The batches, at least as many as all blocks need.
    """

    def __init__(self, name: str, train: Training, batches: Iterable[RankBatch]) -> None:
        self.name = name
        self._train, self._batches = train, batches
        self._wake, self._asleep = threading.Semaphore(0), threading.Semaphore(0)
        self._num_steps: int | None = None  # steps of the next block; None ends the training
        self._cost = Cost(0.0, 0.0)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def block(self, num_steps: int) -> Cost:
        """Train `num_steps` steps and return their cost."""
        self._num_steps = num_steps
        self._hand_over()
        return self._cost

    def end(self) -> None:
        """End the iterator of batches, and wait until the training returns."""
        self._num_steps = None
        self._hand_over()
        self._thread.join()

    def _hand_over(self) -> None:
        if not self._thread.ident:
            self._thread.start()
        self._wake.release()
        self._asleep.acquire()
        if self._error:
            raise RuntimeError(f"{self.name} failed") from self._error

    def _run(self) -> None:
        try:
            self._wake.acquire()
            self._train(self._blocks())
            assert self._num_steps is None, f"{self.name} left its last block early"
        except BaseException as error:  # raised in the waiting thread
            self._error = error
        self._asleep.release()

    def _blocks(self) -> Iterator[RankBatch]:
        batches = iter(self._batches)
        while self._num_steps is not None:
            start, cpu_start = time.perf_counter(), time.process_time()
            for _ in range(self._num_steps):
                yield next(batches)
            self._cost = Cost(time.perf_counter() - start, time.process_time() - cpu_start)
            self._asleep.release()
            self._wake.acquire()
