"""Progress bar of a run on a terminal, drawn by rich."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TaskID, TextColumn
from rich.text import Text

from trainer.base.drawn import SafeConsole
from trainer.base.text import one_line
from trainer.observe.meter import TimeLeft
from trainer.observe.observer import Observer
from trainer.observe.records import EndRecord, EvaluationRecord, RunInfo, StepRecord
from trainer.observe.summary import end_summary, evaluation_lines, format_seconds, start_summary, step_fields, step_line

_OUTCOME_STYLES = {"finished": "bold green", "stopped": "bold yellow", "failed": "bold red"}


def can_draw(stream: TextIO) -> bool:
    """Return whether the terminal of `stream` can move its cursor, which `TERM=dumb` denies."""
    return not SafeConsole(stream).is_dumb_terminal


def fold_fields(fields: Sequence[tuple[str, str]], width: int) -> str:
    """Return names and values on the fewest lines of `width` columns, without a break inside a pair."""
    lines = [""]
    for name, value in fields:
        field = f"{name} {value}"
        if lines[-1] and len(lines[-1]) + 2 + len(field) > width:
            lines.append("")
        lines[-1] += f"  {field}" if lines[-1] else field
    return "\n".join(lines)


class _Count(MofNCompleteColumn):
    """The number of parts that are done; nothing while their number is unknown."""

    def render(self, task: Task) -> Text:
        return Text("") if task.total is None else super().render(task)


class ProgressConsole(Observer):
    """Console with a bar of the steps and the newest numbers below it, and a second bar during an evaluation.

    Before the run starts, a bar names the part of the preparation. Summaries, logged steps, evaluations and notes
    scroll above the bars.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = SafeConsole(stream)
        self._clock = clock
        self._run: RunInfo | None = None
        self._time_left: TimeLeft
        self._live: Live | None = None
        self._evaluation: TaskID | None = None
        self._fields: list[tuple[str, str]] = []
        self._evaluations: list[EvaluationRecord] = []
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            _Count(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            expand=True,
        )
        self._training = self._bars.add_task("training", left="")

    def preparing(self, what: str, done: int = 0, total: int | None = None) -> None:
        if self._live is None:
            # No thread draws it, because a lock of that thread could stay closed in processes that are forked now.
            self._live = Live(
                console=self._console, get_renderable=self._bars.get_renderable, auto_refresh=False, transient=True
            )
            self._live.start()
        self._bars.update(self._training, description=what, completed=done, total=total)
        self._live.refresh()

    def start(self, run: RunInfo) -> None:
        # The bar of the preparation ends before the summary is printed.
        self.close()
        first_step = run.resumed_from or 0
        self._run = run
        self._time_left = TimeLeft(first_step, run.total_steps, self._clock)
        title, *lines = start_summary(run)
        self._print(title, style="bold")
        self._print(*lines, "")
        self._bars.update(self._training, description="training", total=run.total_steps, completed=first_step)
        self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4)
        self._live.start()

    def doing(self, step: int, what: str) -> None:
        if self._run is not None:
            self._bars.update(self._training, completed=step)

    def step(self, record: StepRecord) -> None:
        assert self._run is not None, "a run starts before it is observed"
        # Without the time that is left, which the bar shows.
        self._print(step_line(record, self._run.total_steps, None, self._console.width))
        self._fields = step_fields(record, None)
        seconds = self._time_left.after(record.step)
        left = "" if seconds is None else f"{format_seconds(seconds)} left"
        self._bars.update(self._training, completed=record.step, left=left)

    def evaluation_progress(self, done: int, total: int) -> None:
        if self._evaluation is None:
            self._evaluation = self._bars.add_task("evaluating", total=total, left="")
        self._bars.update(self._evaluation, completed=done)

    def evaluation(self, record: EvaluationRecord) -> None:
        self._drop_evaluation()
        self._evaluations.append(record)
        self._print(*evaluation_lines(record))

    def note(self, text: str) -> None:
        self._print(text)

    def end(self, record: EndRecord) -> None:
        self.close()
        if lines := end_summary(record, self._run, self._evaluations):
            self._print("")
            self._print(lines[0], style=_OUTCOME_STYLES[record.outcome])
            self._print(*lines[1:])

    def close(self) -> None:
        """Leave the bar on the screen and restore the cursor."""
        if self._live is not None:
            self._drop_evaluation()
            self._live.stop()
            self._live = None

    def _drop_evaluation(self) -> None:
        if self._evaluation is not None:
            self._bars.remove_task(self._evaluation)
            self._evaluation = None

    def _render(self) -> Group:
        return Group(self._bars.get_renderable(), Text(fold_fields(self._fields, self._console.width)))

    def _print(self, *lines: str, style: str | None = None) -> None:
        # The terminal wraps long lines, so a copied command holds no line break.
        for line in lines:
            self._console.print(one_line(line), style=style, soft_wrap=True)
