"""A step that is much slower than its plan has one note with the cause that was planted."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from tests.helpers.training import tiny_recipe
from tests.observe.samples import run_info, step_record
from trainer.observe.builders import ObserverParts, registered_observers
from trainer.observe.records import COMPILATION, DEVICE, EVALUATION, ROWS, STEP
from trainer.ranks.environment import LaunchEnvironment
from trainer.tools import watched_speed
from trainer.tools.guard import observer
from trainer.tools.utilisation import Planned, mean_length, shortfall
from trainer.tools.watched_speed import WatchedSpeed

BUSY = {STEP: 1.0, DEVICE: 9.0}


@pytest.mark.parametrize(
    ("seconds", "padding", "keys", "rounded", "words"),
    [
        (
            {ROWS: 7.0, STEP: 1.0, DEVICE: 2.0, EVALUATION: 90.0},
            0.1,
            {},
            None,
            "70% of it waits for rows; set `data.num_w",
        ),
        (BUSY, 0.6, {}, None, "60% of the positions are padding; set `data.padding_free` or"),
        (BUSY, 0.1, {}, 0.01, "fp32, and bf16 is planned at 20% of the time; set `precision=bf16`"),
        (
            {STEP: 9.5, DEVICE: 0.5},
            0.1,
            {"cuda_graphs": False},
            None,
            'waits for the host; set `cuda_graphs` to "auto"',
        ),
        (
            {STEP: 9.5, DEVICE: 0.5},
            0.1,
            {"activation_checkpointing": "full"},
            None,
            "CUDA graphs are off (`activation_c",
        ),
        ({STEP: 9.5, DEVICE: 0.5}, 0.1, {}, None, "waits for the host; use a larger `training.micro_batch_size`"),
        ({COMPILATION: 8.0, **BUSY}, 0.0, {}, None, "44% of it compiles"),
        (BUSY, None, {}, None, "its cause is not known; `trainer why` shows"),
    ],
    ids=["slow loader", "padding", "fp32", "no graphs", "graphs excluded", "late host", "widths", "unknown"],
)
def test_the_note_names_the_largest_cause_and_its_key(
    seconds: dict[str, float], padding: float | None, keys: dict[str, Any], rounded: float | None, words: str
):
    record = step_record(20, seconds=seconds, padding=padding)
    planned = 0.05 if rounded is None else 5 * rounded
    note = shortfall(record, tiny_recipe(**keys), Planned("H100", 103, planned, rounded), is_alone=True)
    assert note is not None
    assert note.startswith(f"a step takes 0.1 s, and {rounded or planned:.3g} s in the plan of H100 (")
    assert words in note


def test_a_step_near_its_plan_has_no_note():
    for planned, is_noted in ((0.061, False), (0.059, True)):
        found = shortfall(step_record(20, seconds=BUSY), tiny_recipe(), Planned("H100", 9, planned), is_alone=True)
        assert (found is not None) == is_noted


def test_a_late_host_is_not_told_from_waits_for_other_ranks():
    record = step_record(20, seconds={STEP: 9.5, DEVICE: 0.5})
    found = shortfall(record, tiny_recipe(), Planned("H100", 9, 0.01), is_alone=False)
    assert found is not None
    assert "not known" in found


class Plans:
    """Short programs in the place of planning commands."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float], code: str = "") -> None:
        self.words: list[list[str]] = []
        self.recipes: list[dict[str, Any]] = []

        def start(command: list[str], *options: str) -> subprocess.Popen[str]:
            self.words.append(command)
            self.recipes.append(json.loads(Path(command[2]).read_text()))
            made = {"time": {"seconds": {"likely": seconds[command[-1].partition("=")[2]]}}, "long": "x" * 2**20}
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            program = code or "import sys; print(sys.stdin.read())"
            child = subprocess.Popen([sys.executable, "-S", "-c", program], stdin=subprocess.PIPE, text=True, **pipes)
            if not code:
                assert child.stdin
                with child.stdin as file:
                    file.write(json.dumps(made))
                child.stdin = None
            return child

        monkeypatch.setattr(watched_speed, "start_plan", start)


def watched(notes: list[str], device: str = "NVIDIA H100 80GB HBM3", **keys: Any) -> WatchedSpeed:
    watch = WatchedSpeed(
        tiny_recipe(**keys), LaunchEnvironment("trainer", world_size=2, local_world_size=2), notes.append
    )
    watch.start(run_info(Path("run"), device=device))
    return watch


def steps(watch: WatchedSpeed, *numbers: int, **changes: Any) -> None:
    """Report steps, each after the plans that run."""
    for number in numbers:
        deadline = time.monotonic() + 60
        while not all(made.done() for made in watch._made.values()) and time.monotonic() < deadline:
            time.sleep(0.01)
        watch.step(step_record(number, seconds=BUSY, **changes))


def test_a_run_is_compared_once_from_step_20_on(monkeypatch: pytest.MonkeyPatch):
    notes: list[str] = []
    plans = Plans(monkeypatch, {"fp32": 0.05, "bf16": 0.02})
    watch = watched(notes)
    steps(watch, 10)
    assert not plans.words
    steps(watch, 20, 30, 40, 50)
    watch.close()
    length = mean_length(step_record(20), tiny_recipe())
    assert [words[3:-1] for words in plans.words] == [["--gpus", "2xH100", "--nodes", "1", "--length", str(length)]] * 2
    assert [words[-1] for words in plans.words] == ["precision=fp32", "precision=bf16"]
    assert plans.recipes[0] == tiny_recipe().model_dump(mode="json")
    (note,) = notes
    assert "(20% of the planned speed)" in note
    assert "set `precision=bf16`" in note
    assert not Path(plans.words[0][2]).exists()


def test_rows_of_another_length_are_planned_again(monkeypatch: pytest.MonkeyPatch):
    notes: list[str] = []
    plans = Plans(monkeypatch, {"bf16": 0.09})
    watch = watched(notes, precision="bf16")
    steps(watch, 20, 30, 40)
    steps(watch, 50, 60, tokens_per_second=33123.4 / 2)
    watch.close()
    assert [words[-2] for words in plans.words] == ["103", "52"]
    assert not notes


def test_a_failed_plan_and_an_unknown_gpu_are_named(monkeypatch: pytest.MonkeyPatch):
    notes: list[str] = []
    Plans(monkeypatch, {"bf16": 0.0}, code="raise SystemExit('no memory')")
    watch = watched(notes, precision="bf16")
    steps(watch, 20, 30, 40)
    watch.close()
    watched(notes, device="Unknown 9000").close()
    assert notes == [
        "the speed is not compared with a plan: the plan failed with exit code 1 (no memory)",
        "the speed is not compared with a plan, because no file describes the device 'Unknown 9000'",
    ]


def test_a_plan_that_cannot_begin_or_answer_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A read-only folder for temporary files, and a program that prints before its plan."""
    notes: list[str] = []
    Plans(monkeypatch, {"bf16": 0.0}, code="print('a warning of a package')")
    watch = watched(notes, precision="bf16")
    steps(watch, 20, 30, 40)
    watch.close()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    watch = watched(notes, precision="bf16")
    steps(watch, 20, 30, 40)
    watch.close()
    unread, unwritten = notes
    assert "compared with a plan: the plan is no JSON ('a warning of a package" in unread
    assert "compared with a plan: [Errno 2] No such file or directory" in unwritten


@pytest.mark.parametrize(("texts", "length"), [(None, 103), (2, 52), (4, 26)])
def test_rows_of_several_texts_are_planned_by_the_length_of_a_text(
    monkeypatch: pytest.MonkeyPatch, texts: int | None, length: int
):
    recipe = tiny_recipe()
    monkeypatch.setattr(type(recipe.task), "texts_per_row", texts)
    assert mean_length(step_record(20), recipe) == length


def test_no_length_is_above_the_longest_text():
    recipe = tiny_recipe(data={**tiny_recipe().data.model_dump(), "max_length": 64})
    assert mean_length(step_record(20), recipe) == 64


def test_a_run_on_cpus_has_no_guard():
    parts: Any = type("Parts", (), {"recipe": tiny_recipe(), "environment": LaunchEnvironment("none")})
    assert observer(parts) is None


@pytest.mark.parametrize(("num_gpus", "rank", "guards"), [(0, 0, 0), (1, 0, 1), (2, 1, 0)])
def test_each_run_on_gpus_has_one_guard(monkeypatch: pytest.MonkeyPatch, num_gpus: int, rank: int, guards: int):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    environment = LaunchEnvironment("trainer", rank=rank, world_size=max(1, num_gpus))
    parts = ObserverParts(tiny_recipe(), environment, MagicMock(), print, print)
    assert [type(one) for one in registered_observers(parts)].count(WatchedSpeed) == guards
