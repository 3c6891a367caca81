"""Console output of a run: a progress bar on a terminal, otherwise plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from trainer.base.terminal import write_lines
from trainer.observe.meter import TimeLeft
from trainer.observe.observer import Observer
from trainer.observe.records import EndRecord, EvaluationRecord, RunInfo, StepRecord
from trainer.observe.summary import end_summary, evaluation_lines, start_summary, step_line


class PlainConsole(Observer):
    """Console for files, pipes and batch systems: one line per logging interval, no colours or cursor movements."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._run: RunInfo | None = None
        self._time_left: TimeLeft

    def start(self, run: RunInfo) -> None:
        self._run = run
        self._time_left = TimeLeft(run.resumed_from or 0, run.total_steps, self._clock)
        self._write(*start_summary(run), "")

    def step(self, record: StepRecord) -> None:
        assert self._run is not None, "a run starts before it is observed"
        self._write(step_line(record, self._run.total_steps, self._time_left.after(record.step)))

    def evaluation(self, record: EvaluationRecord) -> None:
        self._write(*evaluation_lines(record))

    def note(self, text: str) -> None:
        self._write(text)

    def end(self, record: EndRecord) -> None:
        if lines := end_summary(record, self._run):
            self._write("", *lines)

    def _write(self, *lines: str) -> None:
        write_lines(lines, self._stream)


def open_console(stream: TextIO) -> Observer:
    """Return a progress bar if `stream` is a terminal that can draw it, else a plain console."""
    if stream.isatty():
        from trainer.observe.progress import ProgressConsole, can_draw

        if can_draw(stream):
            return ProgressConsole(stream)
    return PlainConsole(stream)
