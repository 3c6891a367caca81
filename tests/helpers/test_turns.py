from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers import turns

SECONDS = 0.3


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(turns._State, "folder", tmp_path)
    monkeypatch.setattr(turns._State, "has_others", True)
    return tmp_path


def take_turn(is_alone: bool, folder: Path) -> None:
    """Record the number of processes that have their turn at the same time."""
    with turns.turn(is_alone):
        mark = folder / f"here-{multiprocessing.current_process().pid}-{is_alone}"
        mark.touch()
        time.sleep(SECONDS)
        here = sorted(folder.glob("here-*"))
        with (folder / "seen").open("a") as seen:
            seen.write(f"{is_alone} {len(here)}\n")
        mark.unlink()


def started(*calls: tuple) -> list[multiprocessing.Process]:
    processes = [multiprocessing.get_context("fork").Process(target=call[0], args=call[1:]) for call in calls]
    for process in processes:
        process.start()
    return processes


def test_a_test_that_is_alone_has_no_other_beside_it(folder):
    for process in started(*((take_turn, alone, folder) for alone in (False, False, True, False, True))):
        process.join(60)
        assert process.exitcode == 0
    seen = (folder / "seen").read_text().splitlines()
    assert len(seen) == 5
    assert [line for line in seen if line.startswith("True")] == ["True 1"] * 2


def test_a_process_that_a_test_leaves_behind_holds_no_turn(folder):
    with turns.turn(False):
        (left,) = started((time.sleep, 60))
    try:
        (other,) = started((take_turn, True, folder))
        other.join(30)
        assert other.exitcode == 0
    finally:
        left.kill()
        left.join()


@dataclass
class Item:
    """The part of a pytest item that turns look at."""

    is_alone: bool

    def get_closest_marker(self, name: str) -> bool | None:
        return self.is_alone or None


def run_item(plugin: turns.Turns, item: Item, following: Item | None) -> None:
    protocol = plugin.pytest_runtest_protocol(item, following)
    next(protocol)
    with pytest.raises(StopIteration):
        protocol.send(True)


def test_tests_that_are_alone_come_first_and_keep_the_machine(folder):
    items = [Item(False), Item(True), Item(False), Item(True)]
    plugin = turns.Turns()
    plugin.pytest_collection_modifyitems(items)
    assert [item.is_alone for item in items] == [True, True, False, False]
    run_item(plugin, items[0], items[1])
    (other,) = started((take_turn, False, folder))
    other.join(2 * SECONDS)
    assert other.is_alive(), "it had its turn between two tests that are alone"
    run_item(plugin, items[1], items[2])
    other.join(30)
    assert other.exitcode == 0


def make_once(folder: Path) -> None:
    def make() -> int:
        with (folder / "made").open("a") as made:
            made.write("made\n")
        time.sleep(SECONDS)
        return 7

    assert turns.once("seven", make) == 7


def test_an_artefact_is_made_by_one_worker(folder):
    for process in started(*[(make_once, folder)] * 3):
        process.join(60)
        assert process.exitcode == 0
    assert (folder / "made").read_text() == "made\n"


def test_waiting_for_an_artefact_is_counted_and_making_it_is_not(folder, monkeypatch):
    monkeypatch.setattr(turns._State, "waited_seconds", 0.0)
    turns.once("slow", lambda: time.sleep(SECONDS))
    assert turns.waited_seconds() < SECONDS


def test_without_other_workers_nothing_waits(folder, monkeypatch):
    monkeypatch.setattr(turns._State, "has_others", False)
    with turns.turn(True), turns.turn(True):
        assert not (folder / "machine").exists()
