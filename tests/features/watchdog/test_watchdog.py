"""What the watchdog says of ranks that stand still; that it ends whole runs is in `tests/launch/test_faults.py`."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import NoReturn

import pytest

from trainer.features.watchdog import watchdog
from trainer.features.watchdog.watchdog import Watchdog, stall_message
from trainer.observe.heartbeat import Heartbeat, Status
from trainer.ranks.report import read_reports


def test_equal_stacks_are_shown_once():
    statuses = {rank: Status(rank, "node0", 100 + rank, 7, "in step 8", 1000.0 + rank) for rank in range(4)}
    stacks = {0: "main A\n\nthread x:\nB", 1: "", 2: "main A\n\nthread y:\nC", 3: "main D"}
    assert stall_message(statuses, stacks, 30.0, now=1040.0).splitlines() == [
        "no rank has made any progress for 30 seconds (`parallel.stall_timeout`)",
        "rank 0 on node0, process 100: after step 7, in step 8, 40 s since its last progress",
        "rank 1 on node0, process 101: after step 7, in step 8, 39 s since its last progress;"
        " no answer: it is stopped or its machine is gone",
        "rank 2 on node0, process 102: after step 7, in step 8, 38 s since its last progress",
        "rank 3 on node0, process 103: after step 7, in step 8, 37 s since its last progress",
        "main thread of ranks 0, 2:",
        "main A",
        "main thread of rank 3:",
        "main D",
    ]


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Filled where a watchdog would have ended the process."""
    reasons: list[str] = []

    def leave() -> NoReturn:
        reasons.append("left")
        raise SystemExit

    monkeypatch.setattr(watchdog, "_leave", leave)
    return reasons


def watched(folder: Path, told: list[str]) -> tuple[Heartbeat, Watchdog]:
    heartbeat = Heartbeat(folder, 1)
    heartbeat.begin(0)
    dog = Watchdog(heartbeat, 0.5, folder / "error.json", told.append)
    dog.doing(0, "waiting for rows")
    return heartbeat, dog


@pytest.mark.alone
def test_a_rank_that_beats_is_left_alone(tmp_path, left):
    told: list[str] = []
    heartbeat, dog = watched(tmp_path, told)
    for step in range(15):
        time.sleep(0.1)
        heartbeat.doing(step, "in a step")
    dog.close()
    assert (told, left) == ([], [])


@pytest.mark.alone
def test_a_rank_that_waits_for_one_that_beats_is_left_alone(tmp_path, left):
    told: list[str] = []
    other = Heartbeat(tmp_path, 0)
    other.begin(0)
    _, dog = watched(tmp_path, told)
    for step in range(15):
        time.sleep(0.1)
        other.doing(step, "saving a checkpoint")
    dog.close()
    assert (told, left) == ([], [])


def test_nothing_is_answered_while_another_rank_makes_progress(tmp_path, monkeypatch):
    answers: list[int] = []
    monkeypatch.setattr(Watchdog, "_all_stand_still", lambda self: False)
    monkeypatch.setattr(Watchdog, "_answer", lambda self, beats: bool(answers.append(beats)))
    _, dog = watched(tmp_path, [])
    time.sleep(1.5)  # three times the timeout
    dog.close()
    assert answers == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_folder_that_does_not_answer_is_reported_without_it(tmp_path, monkeypatch, left, capfd):
    hangs = threading.Event()
    monkeypatch.setattr(watchdog, "_DISK_SECONDS", 0.2)

    def statuses(self: Watchdog) -> dict[int, Status]:
        hangs.wait(60)
        return {}

    monkeypatch.setattr(Watchdog, "_statuses", statuses)
    _, dog = watched(tmp_path, [])
    deadline = time.monotonic() + 60
    while not left and time.monotonic() < deadline:
        time.sleep(0.1)
    dog.close()
    hangs.set()
    assert left == ["left"]
    shown = capfd.readouterr().err
    assert "error: rank 1 has made no progress for 0.5 seconds (`parallel.stall_timeout`), and the folder" in shown
    assert "test_a_folder_that_does_not_answer" in shown, "the stack of the main thread"


def test_a_clock_that_is_set_back_does_not_hide_a_stall(tmp_path, monkeypatch):
    future = {0: Status(0, "node0", 1, 7, "in step 8", time.time() + 3600)}
    dog = Watchdog(Heartbeat(tmp_path, 0), 0.2, None, lambda reason: None)
    monkeypatch.setattr(Watchdog, "_statuses", lambda self: dict(future))
    assert not dog._all_stand_still()
    time.sleep(0.1)
    assert not dog._all_stand_still()
    time.sleep(0.2)
    assert dog._all_stand_still()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # `leave` ends the thread alone
def test_one_that_does_not_reports_and_leaves(tmp_path, left):
    told: list[str] = []
    _, dog = watched(tmp_path, told)
    deadline = time.monotonic() + 60
    while not left and time.monotonic() < deadline:
        time.sleep(0.1)
    dog.close()
    assert left == ["left"]
    assert told == ["no rank has made any progress for 0.5 seconds (`parallel.stall_timeout`)"]
    (report,) = read_reports(tmp_path)
    assert (report.rank, report.is_of_all, str(report.error).splitlines()[:1]) == (1, True, told)
    assert "test_one_that_does_not_reports_and_leaves" in (tmp_path / "ranks" / "rank-00001.stack").read_text()
