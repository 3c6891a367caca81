"""Lets several trainings take turns in one process, a block of steps each: a noisy machine treats them alike."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from trainer.parallel.microbatch import RankBatch


@dataclass(frozen=True)
class Cost:
    """What a block of steps took in this process.

    Other programs prolong the elapsed time, and hardly the processor's; only the elapsed time has the waiting in it.
    """

    seconds: float
    cpu_seconds: float


Training = Callable[[Iterable[RankBatch]], object]
"""Trains one optimizer step on each batch that it is given, until there are no more."""


class Contestant:
    """A training in a thread of its own, which sleeps between its blocks of steps.

    Its batches are what drives it: it is awake while it asks for them, and the clock runs from the moment at which a
    block's first batch is prepared until the batch that would follow its last one is asked for. So every training runs
    its own loop, unchanged, and is timed from outside.

    Args:
        name: for the report.
        train: the training.
        batches: at least as many as all blocks need.
    """

    def __init__(self, name: str, train: Training, batches: Iterable[RankBatch]) -> None:
        self.name = name
        self._train, self._batches = train, batches
        self._wake, self._asleep = threading.Semaphore(0), threading.Semaphore(0)
        self._num_steps: int | None = None  # of the block that follows; None: the training is over
        self._cost = Cost(0.0, 0.0)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def block(self, num_steps: int) -> Cost:
        """Trains `num_steps` steps and gives what they took."""
        self._num_steps = num_steps
        self._hand_over()
        return self._cost

    def end(self) -> None:
        """Tells the training that there are no more batches, and waits until it has returned."""
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
        except BaseException as error:  # told to the thread that waits
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
