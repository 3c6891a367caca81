"""A run folder as reports and lists of runs read it. Nothing here needs torch or plotly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from trainer.base.errors import UsageError
from trainer.base.owned_lock import OwnedLock
from trainer.checkpoint.names import saved_steps
from trainer.checkpoint.owner import OWNER_FILE
from trainer.observe.heartbeat import read_statuses
from trainer.observe.metrics_file import METRICS_FILE_NAME, STAGE_FILE_NAME
from trainer.observe.records import EvaluationRecord
from trainer.observe.summary import format_decimal
from trainer.tasks.metrics.table import merit
from trainer.tools.report import MISSING
from trainer.tools.run_metrics import Metrics, read_metrics

MOST_STEPS = 20_000
"""The training lines of a run that a report shows; it leaves out every second one of more, again and again."""


@dataclass(frozen=True)
class Run:
    """A run folder, with the content of its `metrics.jsonl`."""

    name: str
    folder: Path
    metrics: Metrics
    state: str  # `running`, the outcome `finished`, `stopped` or `failed`, or `killed`
    steps_before: int = 0  # of earlier stages of its recipe, which the axes of curves add

    @property
    def info(self) -> Mapping[str, Any]:
        """The facts of its last start; empty if it has none."""
        return self.metrics.runs[-1] if self.metrics.runs else {}

    @property
    def end(self) -> Mapping[str, Any]:
        """The facts of its last end; empty if it has none."""
        return self.metrics.end or {}

    @property
    def last_step(self) -> int:
        """The last step that the metrics, a checkpoint or a heartbeat shows, or 0; not all steps are logged."""
        found = [int(self.end.get("step", 0)), *saved_steps(self.folder)]
        found += [one.step for one in self.metrics.steps[-1:]]
        found += [one.step for one in self.metrics.evaluations[-1:]]
        return max(*found, 0, *(one.step for one in read_statuses(self.folder).values()))

    @property
    def message(self) -> str | None:
        """The reason of the last end; None if it needs none."""
        message = self.end.get("message")
        return None if message is None or self.state == "running" else str(message)

    def key(self, *names: str) -> Any:
        """Return a key of its recipe, which anyone may have edited; None: it is missing."""
        value = self.info.get("recipe")
        for name in names:
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    @property
    def rank_peaks(self) -> list[int]:
        """The bytes of the peak memory of each rank; empty if they are unknown."""
        return list(map(max, zip_longest(*(one.rank_memory_bytes for one in self.metrics.steps), fillvalue=0)))

    def evaluated(self, metric: str) -> list[tuple[int, float]]:
        """Return the steps of evaluations, and the values of a metric in them."""
        return [(one.step, one.metrics[metric]) for one in self.metrics.evaluations if metric in one.metrics]


def read_run(folder: Path, name: str | None = None, state: str | None = None) -> Run:
    """Read a run folder, even while it is written.

    Args:
        name: its name on a page; None: that of the folder.
        state: its state; None: look at the lock of the folder, which must not be that of this process.

    Raises:
        UsageError: it holds no metrics, or damaged ones.
    """
    try:
        metrics = read_metrics(folder / METRICS_FILE_NAME, MOST_STEPS)
    except OSError as error:
        stages = stage_folders(folder)
        fix = f"one of its stages, such as {stages[-1]}" if stages else "a folder that holds one"
        raise UsageError(
            f"{str(folder)!r} must be the folder of a run with a {METRICS_FILE_NAME} ({error.strerror}); name {fix}"
        ) from error
    return Run(name or folder.resolve().name, folder, metrics, state or _state(folder, metrics))


def _state(folder: Path, metrics: Metrics) -> str:
    # The lock comes before the end in the metrics, because a run that starts again has an earlier end there.
    with suppress(OSError):  # a file system without locks, or the run of another user
        if OwnedLock(folder / OWNER_FILE).is_held():
            return "running"
    if metrics.end is not None:
        return str(metrics.end["outcome"])
    # An earlier version wrote no end.
    total = metrics.runs[-1].get("total_steps") if metrics.runs else None
    return "finished" if metrics.steps and metrics.steps[-1].step == total else "killed"


def read_runs(folders: Sequence[Path], state: str | None = None) -> list[Run]:
    """Read run folders; the shortest ends of their paths that differ name them.

    The folder of a recipe with stages stands for those of its stages, with one axis of steps for all curves.
    """
    stages = {folder: stage_folders(folder) for folder in folders}
    if any(stages.values()):
        return [run for folder in folders for run in _joined(stages[folder] or [folder], state)]
    parts = [folder.resolve().parts for folder in folders]
    if len(set(parts)) < len(parts):
        raise UsageError("each run must be named once, but one is named twice; remove it")
    length = next(n for n in range(1, max(map(len, parts)) + 1) if len({p[-n:] for p in parts}) == len(parts))
    return [read_run(folder, "/".join(part[-length:]), state) for folder, part in zip(folders, parts, strict=True)]


def stage_folders(folder: Path) -> list[Path]:
    """Return the folders of the stages that were trained in the folder of a recipe; empty: it has none."""
    return sorted(file.parent for file in folder.glob(f"[0-9][0-9]-*/{STAGE_FILE_NAME}") if has_metrics(file.parent))


def has_metrics(folder: Path) -> bool:
    """Return whether a folder is that of a run."""
    return (folder / METRICS_FILE_NAME).is_file()


def _joined(folders: Sequence[Path], state: str | None) -> Iterator[Run]:
    before = 0
    for folder in folders:
        run = read_run(folder, f"{folder.parent.name}/{folder.name}" if len(folders) > 1 else None, state)
        yield replace(run, steps_before=before)
        before += run.last_step


def best_of(metrics: Metrics, metric: str) -> EvaluationRecord | None:
    """Return the best evaluation by a metric, or None."""
    found = [one for one in metrics.evaluations if metric in one.metrics]
    return max(found, key=lambda one: _merit(metric, one.metrics), default=None)


def _merit(metric: str, metrics: Mapping[str, float]) -> tuple[float, ...]:
    with suppress(KeyError):  # a metric of the user's own package, which is not loaded
        return merit(metric, metrics)
    return (metrics[metric],)


def best_metric(run: Run) -> str:
    """Return the name of the metric of `evaluation.best`, of the first metric, or `loss`."""
    named = str(run.key("evaluation", "best"))
    metrics = run.metrics.evaluations[0].metrics if run.metrics.evaluations else {}
    return named if named in metrics else next((one for one in metrics if one != "loss"), "loss")


def best_text(run: Run) -> str:
    """Return the best evaluation by `best_metric`."""
    name = best_metric(run)
    found = best_of(run.metrics, name)
    return f"{name} {format_decimal(found.metrics[name])} at step {found.step}" if found else MISSING


def seconds_of(run: Run) -> float:
    """Return the time of all steps: a record's mean stands for the steps since the record before it."""
    starts = [0, *(one.step for one in run.metrics.steps)]
    return sum((one.step - start) * one.step_seconds for start, one in zip(starts, run.metrics.steps, strict=False))
