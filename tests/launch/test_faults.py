"""Faults and requests in whole runs of local ranks: what `trainer run --processes N` makes of each."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import processes
from tests.helpers.tiny_run import write_tiny_run
from trainer.observe.metrics_file import Metrics, read_metrics

FAULTY = processes.ROOT / "tests" / "helpers" / "faulty_run.py"
ENDLESS = ("training.max_steps=100000", "evaluation.every=null")


def start(recipe: Path, *arguments: str, fault: tuple[str, int, int] | None = None, **variables: str):
    """`trainer run` of two local ranks; with `fault`, as `faulty_run.py` describes it."""
    program = ["-m", "trainer"] if fault is None else [str(FAULTY), *map(str, fault)]
    words = [*arguments] if "--processes" in arguments else ["--processes", "2", *arguments]
    return processes.start([sys.executable, *program, "run", recipe, *words], **variables)


def run(recipe: Path, *arguments: str, fault: tuple[str, int, int] | None = None, **variables: str):
    return finish(start(recipe, *arguments, fault=fault, **variables))


def finish(process: subprocess.Popen[str], timeout_seconds: float = 90) -> subprocess.CompletedProcess[str]:
    ended = processes.finish(process, timeout_seconds)
    print(ended.stdout, ended.stderr)  # shown where the test fails
    return ended


def metrics(recipe: Path) -> Metrics:
    return read_metrics(recipe.parent / "run" / "metrics.jsonl")


def checkpoints(recipe: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (recipe.parent / "run" / "checkpoints").glob("step-*"))


def wait_until(process: subprocess.Popen[str], happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        if process.poll() is not None or time.monotonic() > deadline:
            print(*finish(process, 1).args)
            raise AssertionError("it did not happen")
        time.sleep(0.05)


def is_training(recipe: Path) -> bool:
    file = recipe.parent / "run" / "metrics.jsonl"
    return file.exists() and len(file.read_text().splitlines()) > 3


class TestRequests:
    @pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
    def test_the_file_save_saves_and_stop_stops(self, tmp_path, workers):
        recipe, folder = write_tiny_run(tmp_path), tmp_path / "run"
        process = start(recipe, *ENDLESS, f"data.num_workers={workers}", 'logging.to=["console"]')
        wait_until(process, lambda: is_training(recipe))
        (folder / "save").touch()
        wait_until(process, lambda: not (folder / "save").exists())
        saved = checkpoints(recipe)
        assert len(saved) == 1
        (folder / "stop").touch()
        ended = finish(process)
        assert ended.returncode == 75
        assert "stopped by the file `stop`" in ended.stdout
        assert not (folder / "stop").exists()
        assert checkpoints(recipe)[:-1] == saved
        assert checkpoints(recipe)[-1] == metrics(recipe).steps[-1].step

    @pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
    def test_sigusr1_to_the_launcher(self, tmp_path, workers):
        recipe = write_tiny_run(tmp_path)
        process = start(recipe, *ENDLESS, f"data.num_workers={workers}")
        wait_until(process, lambda: is_training(recipe))
        process.send_signal(signal.SIGUSR1)
        assert finish(process).returncode == 75
        assert checkpoints(recipe) == [metrics(recipe).steps[-1].step]

    @pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
    def test_sigusr1_to_one_rank(self, tmp_path, workers):
        recipe = write_tiny_run(tmp_path)
        assert run(recipe, *ENDLESS, f"data.num_workers={workers}", fault=("warn", 1, 5)).returncode == 75
        assert checkpoints(recipe) == [6]
