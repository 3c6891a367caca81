"""The report of a run, kept up to date while it trains."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from trainer.base.errors import TrainerError
from trainer.observe.observer import Observer
from trainer.observe.records import EndRecord, EvaluationRecord, RunInfo, StepRecord
from trainer.tools.report.report import write_report

_SECONDS = 60.0
_PAUSE = 50  # times the seconds of writing, since it reads all lines of the run


class LiveReport(Observer):
    """Observer that writes `report.html`: once a minute, after an evaluation, and at the end.

    It takes at most one fiftieth of the time. It reads `metrics.jsonl`, so its place is behind the observer that
    writes this file.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._folder: Path | None = None
        self._next = 0.0  # for a step
        self._rested = 0.0  # when writing has paused long enough

    def start(self, run: RunInfo) -> None:
        self._folder = run.folder

    def step(self, record: StepRecord) -> None:
        if self._clock() >= self._next:
            self._write("running")

    def evaluation(self, record: EvaluationRecord) -> None:
        if self._clock() >= self._rested:
            self._write("running")

    def end(self, record: EndRecord) -> None:
        try:
            self._write(record.outcome)
        except TrainerError:
            if record.outcome != "failed":  # a full disk may be the failure itself, and must not hide it
                raise

    def _write(self, state: str) -> None:
        if self._folder is not None:
            # The state is given: to look at the lock of one's own process would release it.
            begun = self._clock()
            write_report([self._folder], None, state)
            end = self._clock()
            self._rested = end + _PAUSE * (end - begun)
            self._next = max(end + _SECONDS, self._rested)
