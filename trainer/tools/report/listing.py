"""The runs below a folder, as a table."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.base.errors import UsageError
from trainer.base.text import aligned
from trainer.checkpoint.names import saved_steps
from trainer.observe.metrics_file import METRICS_FILE_NAME
from trainer.observe.summary import format_bytes, format_seconds
from trainer.tools.report.runs import best_text, read_run, seconds_of

_DEPTH = 2
_HEADER = ("run", "state", "step", "checkpoint", "best", "time", "size")


@dataclass(frozen=True)
class Listed:
    """A run of a listing."""

    folder: str
    state: str  # `running`, `finished`, `stopped`, `failed`, `killed`, or `unreadable`
    message: str | None  # the reason of the state; None if it needs none
    step: int  # the last step that the run shows
    total_steps: int | None  # the steps of the whole training; None if unknown
    checkpoint: int | None  # the step of its last complete checkpoint; None without one
    best: str  # the best evaluation as text
    seconds: float  # the time of the logged steps
    num_bytes: int  # the size of all files of the folder


def find_runs(folder: Path) -> list[Listed]:
    """Return the runs in a folder and at most two levels below it, in the order of their paths.

    Raises:
        UsageError: there is no such folder.
    """
    if not folder.is_dir():
        raise UsageError(f"{str(folder)!r} must be a folder with runs, but is none; name the folder above your runs")
    return [_listed(path) for path in sorted(_run_folders(folder, _DEPTH))]


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / METRICS_FILE_NAME).is_file():
        yield folder
    elif depth > 0:
        try:
            below = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
        except OSError:  # without the right to read it
            return
        for path in below:
            yield from _run_folders(path, depth - 1)


def _listed(folder: Path) -> Listed:
    size = _size(folder)
    try:
        run = read_run(folder)
    except UsageError as error:
        return Listed(str(folder), "unreadable", str(error), 0, None, None, "-", 0.0, size)
    total, saved = run.info.get("total_steps"), max(saved_steps(folder), default=None)
    best, seconds = best_text(run), seconds_of(run)
    return Listed(str(folder), run.state, run.message, run.last_step, total, saved, best, seconds, size)


def _size(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:  # removed meanwhile by the run
                continue
    return total


def listing(runs: Sequence[Listed]) -> Iterator[str]:
    """Yield the lines of a table of runs, then the messages of failed ones."""
    yield from aligned([_HEADER, *map(_cells, runs)])
    for one in runs:
        if one.message:
            first = one.message.strip().splitlines()[0]
            yield f"{one.state:<10}{one.folder}: {first}"


def _cells(one: Listed) -> tuple[str, ...]:
    step = f"{one.step} of {'?' if one.total_steps is None else one.total_steps}"
    saved = "-" if one.checkpoint is None else str(one.checkpoint)
    return (one.folder, one.state, step, saved, one.best, format_seconds(one.seconds), format_bytes(one.num_bytes))
