"""Trackio's local store: the package itself where it is installed, and otherwise a stand-in for its interface."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.observe.samples import end_record, run_info, step_record
from trainer.base.errors import UsageError
from trainer.features.trackers.tracking import IDS_FILE_NAME, Tracker
from trainer.features.trackers.trackio import TrackioService
from trainer.observe.records import EvaluationRecord

IS_INSTALLED = find_spec("trackio") is not None  # it needs an older pillow than the pinned one


class StandIn(SimpleNamespace):
    """Trackio's functions that `TrackioService` calls, with a store in memory."""

    def __init__(self) -> None:
        super().__init__(runs={}, utils=SimpleNamespace(TRACKIO_DIR="memory"), finished=[])
        self.context_vars = SimpleNamespace(current_run=SimpleNamespace(set=lambda run: None))

    def init(self, project: str, *, name: str, config: dict, resume: str, embed: bool, **monitors: bool) -> Any:
        assert not embed
        assert monitors == {"auto_log_gpu": False, "auto_log_cpu": False}
        if resume == "must" and (project, name) not in self.runs:
            raise ValueError(f"Run '{name}' does not exist in project '{project}'")
        print("* Trackio project initialized")
        rows = self.runs.setdefault((project, name), [])
        return SimpleNamespace(
            name=name,
            url=None,
            _next_step=max((row["step"] for row in rows), default=-1) + 1,
            log=lambda metrics, step: rows.append({"step": step, **metrics}),
            finish=lambda: self.finished.append(name),
        )

    def rows(self, project: str) -> dict[str, list[dict[str, Any]]]:
        return {name: rows for (of, name), rows in self.runs.items() if of == project}


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """Return the rows of each run of a project."""
    if not IS_INSTALLED:
        stand_in = StandIn()
        monkeypatch.setitem(sys.modules, "trackio", stand_in)
        return stand_in.rows
    for name in [name for name in os.environ if name.startswith("TRACKIO_")]:
        monkeypatch.delenv(name)
    from trackio import sqlite_storage, utils

    for module in (utils, sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "store")
    storage = sqlite_storage.SQLiteStorage
    return lambda project: {name: storage.get_logs(project, name) for name in storage.get_runs(project)}


def write(folder: Path, steps: range, resumed_from: int | None = None) -> list[str]:
    notes: list[str] = []
    tracker = Tracker(TrackioService("reviews"), notes.append)
    tracker.start(run_info(folder, resumed_from=resumed_from))
    for step in steps:
        tracker.step(step_record(step, loss=1 / step))
        if step % 2 == 0:
            tracker.evaluation(EvaluationRecord(step, {"accuracy": step / 8}))
    tracker.end(end_record(folder, step=steps[-1]))
    tracker.close()
    return notes


def test_a_run_goes_on_as_the_same_run(rows, tmp_path, capsys):
    notes = write(tmp_path, range(1, 5))
    ((name, first),) = rows("reviews").items()
    assert name.startswith("small-")
    assert notes[0].startswith(f"Trackio: run {name} in ")
    assert "`trackio show --project reviews`" in notes[0]
    assert {row["step"]: row["train/loss"] for row in first if "train/loss" in row} == {
        1: 1,
        2: 1 / 2,
        3: 1 / 3,
        4: 1 / 4,
    }
    assert [row["eval/accuracy"] for row in first if "eval/accuracy" in row] == [0.25, 0.5]
    assert [row["best/accuracy"] for row in first if "best/accuracy" in row] == [0.8125]
    write(tmp_path, range(4, 7), resumed_from=3)
    ((again, both),) = rows("reviews").items()
    assert again == name
    assert [row["step"] for row in both if "train/loss" in row] == [1, 2, 3, 4, 5, 6]
    assert capsys.readouterr().out == "", "only the console writes to the terminal"


def test_a_run_that_is_not_there(rows, tmp_path):
    (tmp_path / IDS_FILE_NAME).write_text('{"trackio": "lost"}')
    with pytest.raises(UsageError, match="names the Trackio run small-lost, but the project reviews has none"):
        write(tmp_path, range(1, 2), resumed_from=1)


@pytest.mark.skipif(IS_INSTALLED, reason="the package is there")
def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(UsageError, match=r'`logging.to` holds "trackio", which needs packages'):
        TrackioService(None)
