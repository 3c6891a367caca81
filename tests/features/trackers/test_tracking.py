"""What holds for every tracker, tried with a service that does as it is told; the real ones have their own files."""

import errno
import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.observe.samples import end_record, run_info, step_record
from trainer.base.errors import ExitCode, TrainerError, UsageError
from trainer.features.trackers import tracking
from trainer.features.trackers.tracking import IDS_FILE_NAME, Point, Tracker
from trainer.observe.records import EndRecord, EvaluationRecord, RunInfo


class FakeService:
    name, word = "Fake", "fake"

    def __init__(self) -> None:
        self.opened: list[str | None] = []
        self.points: list[Point] = []
        self.ends: list[EndRecord] = []
        self.first_step = 0
        self.is_away = False
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.times_closed = 0

    def open(self, run: RunInfo, run_id: str | None) -> tuple[str, int]:
        self._fail_if_away()
        self.opened.append(run_id)
        return run_id or f"id-{len(self.opened)}", self.first_step

    def place(self) -> str:
        return "somewhere"

    def write(self, points: Sequence[Point]) -> None:
        self.may_go_on.wait(60)
        self._fail_if_away()
        self.points += points

    def finish(self, end: EndRecord) -> None:
        self._fail_if_away()
        self.ends.append(end)

    def close(self) -> None:
        self.times_closed += 1

    def _fail_if_away(self) -> None:
        if self.is_away:
            raise ConnectionError("no route\nto http://me:secret@host/")


def started(service: FakeService, folder: Path, resumed_from: int | None = None) -> tuple[Tracker, list[str]]:
    notes: list[str] = []
    tracker = Tracker(service, notes.append, retry_seconds=0.05)
    tracker.start(run_info(folder, resumed_from=resumed_from))
    return tracker, notes


def wait_for(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_service_gets_every_number_by_its_name_and_the_end(tmp_path):
    service = FakeService()
    tracker, notes = started(service, tmp_path)
    tracker.step(step_record(3))
    tracker.evaluation(EvaluationRecord(3, {"loss": 0.25}))
    tracker.end(end_record(tmp_path))
    tracker.close()
    train, evaluation = service.points
    assert train.step == evaluation.step == 3
    assert train.values["train/loss"] == step_record(3).loss
    assert not {"train/step", "train/mfu", "train/loss_scale"} & set(train.values)
    assert evaluation.values == {"eval/loss": 0.25}
    assert service.ends == [end_record(tmp_path)]
    assert notes == ["Fake: somewhere"]
    assert service.times_closed == 1


def test_a_resumed_run_continues_its_tracked_run_and_a_new_run_starts_another(tmp_path):
    service = FakeService()
    for resumed_from in (None, 4, None):
        tracker, _ = started(service, tmp_path, resumed_from)
        tracker.end(end_record(tmp_path))
    assert service.opened == [None, "id-1", None]
    assert json.loads((tmp_path / IDS_FILE_NAME).read_text()) == {"fake": "id-3"}


def test_steps_that_the_service_holds_are_not_sent_again(tmp_path):
    service = FakeService()
    service.first_step = 5
    tracker, _ = started(service, tmp_path)
    for step in range(3, 8):
        tracker.step(step_record(step))
    tracker.end(end_record(tmp_path))
    assert [point.step for point in service.points] == [5, 6, 7]


@pytest.mark.parametrize("text", ["", "[]", '{"fake": 1}', '{"fake": "../../etc"}', '{"fake": "a b"}'])
def test_a_damaged_file_of_ids_is_refused(tmp_path, text):
    (tmp_path / IDS_FILE_NAME).write_text(text)
    with pytest.raises(UsageError, match=r"tracking\.json` must name the tracked runs"):
        started(FakeService(), tmp_path, 4)


@pytest.mark.parametrize(("number", "code"), [(errno.EIO, 1), (errno.ESTALE, 1), (errno.EACCES, 2)])
def test_ids_that_the_storage_does_not_give_are_no_mistake_of_the_user(tmp_path, monkeypatch, number, code):
    def fail(path: Path) -> bytes:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("trainer.features.trackers.tracking.read_plain", fail)
    with pytest.raises(TrainerError, match=r"tracking\.json` must name .*but cannot be read .* start again") as raised:
        started(FakeService(), tmp_path, 4)
    assert raised.value.exit_code == code


def test_an_unusable_service_is_refused_in_one_sentence(tmp_path):
    service = FakeService()
    service.is_away = True
    with pytest.raises(TrainerError) as raised:
        started(service, tmp_path)
    assert raised.value.exit_code == ExitCode.FAILED, "another start may find the server"
    assert str(raised.value) == (
        '`logging.to` holds "fake", but Fake cannot be used (no route to http://host/); fix that, or remove it from'
        " `logging.to`"
    )


def test_a_service_that_returns_gets_the_missing_records_with_one_warning(tmp_path):
    service = FakeService()
    tracker, notes = started(service, tmp_path)
    service.is_away = True
    for step in range(1, 4):
        tracker.step(step_record(step))
        wait_for(lambda: "complaint" in tracker._notes.kinds)
        tracker.doing(step, "in a step")
    service.is_away = False
    wait_for(lambda: len(service.points) == 3)
    tracker.end(end_record(tmp_path))
    assert [point.step for point in service.points] == [1, 2, 3]
    assert len(service.ends) == 1
    assert notes[1:] == [
        "Fake cannot be written (no route to http://host/); training continues, and missing points are retried"
    ]


def test_a_service_that_is_away_at_a_restart_gets_all_points_later(tmp_path):
    service = FakeService()
    started(service, tmp_path)[0].end(end_record(tmp_path))
    service.is_away = True
    tracker, notes = started(service, tmp_path, 4)
    tracker.step(step_record(5))
    wait_for(lambda: tracker._waiting)
    service.is_away = False
    wait_for(lambda: service.points)
    tracker.end(end_record(tmp_path))
    assert service.opened == [None, "id-1"]
    assert [point.step for point in service.points] == [5]
    assert len(service.ends) == 2
    assert notes == [
        "Fake cannot be written (no route to http://host/); training continues, and missing points are retried",
        "Fake: somewhere",
    ]


def test_records_that_a_service_lacks_at_the_end_are_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "_MOST_POINTS", 5)
    service = FakeService()
    tracker, notes = started(service, tmp_path)
    service.is_away = True
    for step in range(1, 9):
        tracker.step(step_record(step))
    wait_for(lambda: len(tracker._waiting) == 5)
    tracker.end(end_record(tmp_path))
    tracker.close()
    assert notes[-1] == "Fake lacks 8 points of this run, which are in `metrics.jsonl`"
    assert service.times_closed == 1


@pytest.mark.alone
def test_a_service_that_hangs_stalls_neither_a_step_nor_the_end(tmp_path, monkeypatch):
    for name in ("END_SECONDS", "_LAST_WORDS_SECONDS"):
        monkeypatch.setattr(tracking, name, 0.1)
    service = FakeService()
    service.may_go_on.clear()
    tracker, notes = started(service, tmp_path)
    began = time.monotonic()
    for step in range(1, 1000):
        tracker.step(step_record(step))
    tracker.end(end_record(tmp_path))
    tracker.close()
    assert time.monotonic() - began < 5
    assert notes[-1] == "Fake does not answer; missing points are in `metrics.jsonl`"
    assert service.times_closed == 0, "it is still in use"
    service.may_go_on.set()


def test_an_end_without_a_start_sends_nothing(tmp_path):
    service = FakeService()
    tracker = Tracker(service, print)
    tracker.end(end_record(tmp_path, outcome="failed", exit_code=1))
    tracker.close()
    assert service.ends == []
    assert service.times_closed == 1
