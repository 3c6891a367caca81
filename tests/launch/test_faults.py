"""Faults and requests in complete runs of local ranks: the reaction of `trainer run --processes N`."""

from __future__ import annotations

import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.helpers import processes, warm
from tests.helpers.tiny_run import write_tiny_run
from trainer.tools.run_metrics import Metrics, read_metrics

ENDLESS = ("training.max_steps=100000", "evaluation.every=null")


def start(recipe: Path, *arguments: str, fault: tuple[str, int, int] | None = None, **variables: str):
    """Start `trainer run` with two local ranks by default, with a fault of `faulty_run.py` if one is given."""
    words = [*arguments] if "--processes" in arguments else ["--processes", "2", *arguments]
    return warm.start([*(fault or ()), "run", recipe, *words], faulty=fault is not None, **variables)


def run(recipe: Path, *arguments: str, fault: tuple[str, int, int] | None = None, **variables: str):
    return finish(start(recipe, *arguments, fault=fault, **variables))


def finish(process: warm.WarmProcess, timeout_seconds: float = 480) -> subprocess.CompletedProcess[str]:
    ended = processes.finish(process, timeout_seconds)
    print(ended.stdout, ended.stderr)  # pytest shows them if the test fails
    return ended


def metrics(recipe: Path) -> Metrics:
    return read_metrics(recipe.parent / "run" / "metrics.jsonl")


def checkpoints(recipe: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (recipe.parent / "run" / "checkpoints").glob("step-*"))


def wait_until(process: warm.WarmProcess, happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not happened():
        if process.poll() is not None or time.monotonic() > deadline:
            print(*finish(process, 1).args)
            raise AssertionError("it did not happen")
        time.sleep(0.05)


def is_training(recipe: Path, lines: int = 5) -> bool:
    """Return whether `metrics.jsonl` has that many lines: one for the run, and one for each step."""
    file = recipe.parent / "run" / "metrics.jsonl"
    return file.exists() and len(file.read_text().splitlines()) >= lines


class TestRequests:
    def test_the_file_save_saves_and_stop_stops(self, tmp_path):
        recipe, folder = write_tiny_run(tmp_path), tmp_path / "run"
        process = start(recipe, *ENDLESS, 'logging.to=["console"]')
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

    def test_sigusr1_to_the_launcher(self, tmp_path):
        recipe = write_tiny_run(tmp_path)
        process = start(recipe, *ENDLESS, "data.num_workers=2")
        wait_until(process, lambda: is_training(recipe))
        process.send_signal(signal.SIGUSR1)
        assert finish(process).returncode == 75
        assert checkpoints(recipe) == [metrics(recipe).steps[-1].step]

    @pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
    def test_sigusr1_to_one_rank(self, tmp_path, workers):
        recipe = write_tiny_run(tmp_path)
        assert run(recipe, *ENDLESS, f"data.num_workers={workers}", fault=("warn", 1, 5)).returncode == 75
        assert checkpoints(recipe) == [6]


def forked_ranks(process: warm.WarmProcess) -> list[psutil.Process]:
    return psutil.Process(process.pid).children()


class TestRestarts:
    def test_a_killed_rank_is_named_and_all_start_again_from_the_checkpoint(self, tmp_path):
        recipe, undisturbed = write_tiny_run(tmp_path / "a"), write_tiny_run(tmp_path / "b")
        ended = run(
            recipe, "checkpoint.every=2 steps", "checkpoint.asynchronous=false", "checkpoint.resume=never",
            "--max-restarts", "2", fault=("die", 1, 6), FAULT_ONCE=str(tmp_path / "once"),
        )  # fmt: skip
        assert ended.returncode == 0
        assert re.search(r"rank 1 \(process \d+ on \S+\), after step 5, in step 6, was killed by SIGKILL", ended.stderr)
        assert "restart 1 of 2: all ranks start again from the last checkpoint" in ended.stderr
        assert "restart 2" not in ended.stderr
        assert [start["resumed_from"] for start in metrics(recipe).runs] == [None, 4]
        assert run(undisturbed).returncode == 0
        losses = [[record.loss for record in metrics(file).steps] for file in (recipe, undisturbed)]
        assert losses[0] == losses[1]
        assert not (recipe.parent / "run" / "ranks").exists()

    @pytest.mark.slow
    def test_a_bug_is_reported_with_its_traceback_at_each_restart(self, tmp_path):
        ended = run(write_tiny_run(tmp_path), "--max-restarts", "1", fault=("raise", 1, 3))
        assert ended.returncode == 1
        assert ended.stderr.count("RuntimeError: the fault") == 2
        assert re.search(r"error: rank 1 \(process \d+ on \S+\), after step 2, in step 3, failed:", ended.stderr)
        assert ended.stderr.count("restart ") == 1
        assert "another rank failed" not in ended.stderr

    @pytest.mark.slow
    def test_one_process_too(self, tmp_path):
        recipe = write_tiny_run(tmp_path)
        once = str(tmp_path / "once")
        ended = run(recipe, "--processes", "1", "--max-restarts", "1", fault=("die", 0, 3), FAULT_ONCE=once)
        assert ended.returncode == 0
        assert "restart 1 of 1" in ended.stderr

    @pytest.mark.slow
    def test_a_rank_that_is_asked_to_stop_is_not_restarted(self, tmp_path):
        ended = run(write_tiny_run(tmp_path), "--max-restarts", "2", fault=("terminate", 1, 3))
        assert ended.returncode == 75
        assert "restart" not in ended.stderr

    @pytest.mark.slow
    def test_a_wrong_recipe_is_not_restarted(self, tmp_path):
        recipe = write_tiny_run(tmp_path)
        (tmp_path / "run").write_text("a file in the way")
        ended = run(recipe, "--max-restarts", "2")
        assert ended.returncode == 2
        assert "restart" not in ended.stderr

    def test_a_signal_between_two_attempts_is_honoured(self, tmp_path):
        recipe = write_tiny_run(tmp_path)
        saving = ("checkpoint.every=1 step", "checkpoint.asynchronous=false")
        process = start(recipe, *saving, "--max-restarts", "5", fault=("die", 1, 3))
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        assert any("restart 1 of 5" in line for line in lines)
        process.send_signal(signal.SIGTERM)
        ended = finish(process)
        assert ended.returncode == 75
        assert "stopped by SIGTERM before the restart" in ended.stderr
        assert checkpoints(recipe) == [1, 2]

    def test_ranks_of_another_launcher_are_not_ours_to_restart(self, tmp_path):
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        command = [sys.executable, "-m", "trainer", "run", write_tiny_run(tmp_path), "--max-restarts", "2"]
        ended = processes.run(command, **ranks, **address)
        assert ended.returncode == 2
        assert "--max-restarts is 2, but variables started the ranks" in ended.stderr


class TestStalls:
    TIMEOUT = "parallel.stall_timeout=8 seconds"

    @pytest.mark.alone
    @pytest.mark.slow
    @pytest.mark.parametrize(("rank", "world_size"), [(0, 2), pytest.param(1, 3, marks=pytest.mark.nightly)])
    def test_a_stopped_rank_is_reported_and_ends_with_the_others(self, tmp_path, rank, world_size):
        recipe = write_tiny_run(tmp_path, training={"global_batch_size": 12})
        process = start(
            recipe, self.TIMEOUT, 'logging.to=["console"]', "--processes", str(world_size), fault=("stop", rank, 3)
        )
        wait_until(process, lambda: is_training(recipe, 3))
        ranks, before = forked_ranks(process), time.monotonic()
        ended = finish(process)
        assert ended.returncode == 1
        assert time.monotonic() - before < 60, "nobody waits for the stopped one"
        assert "error: no rank has made any progress for 8 seconds" in ended.stderr
        told = {int(line.split()[1]): line for line in ended.stderr.splitlines() if " since its last progress" in line}
        assert told.keys() == set(range(world_size))
        for other, line in told.items():
            assert re.search(r"process \d+: after step 2, in step 3, \d+ s since its last progress", line)
            assert line.endswith("no answer: it is stopped or its machine is gone") == (other == rank)
        answered = ", ".join(str(other) for other in told if other != rank)
        assert f"main thread of rank{'s' if world_size > 2 else ''} {answered}:" in ended.stderr
        assert "begin_step" in ended.stderr
        assert ended.stderr.count("no rank has made any progress") == 1
        if rank != 0:
            assert "exit code 1" in ended.stdout
            assert "restart" in ended.stdout
        assert len(ranks) == world_size
        assert not any(psutil.pid_exists(one.pid) for one in ranks)

    @pytest.mark.slow
    def test_an_endless_loop_is_shown_and_is_a_failure_that_restarts(self, tmp_path):
        once = str(tmp_path / "once")
        ended = run(
            write_tiny_run(tmp_path), self.TIMEOUT, "--max-restarts", "1", fault=("loop", 1, 3), FAULT_ONCE=once
        )
        assert ended.returncode == 0
        assert "no rank has made any progress" in ended.stderr
        assert "endless_loop" in ended.stderr
        assert "no answer" not in ended.stderr
        assert "main thread of rank 0:" in ended.stderr
        assert "main thread of rank 1:" in ended.stderr
        assert "restart 1 of 1" in ended.stderr


class TestBadSteps:
    def test_are_skipped_and_reported_with_their_rows(self, tmp_path):
        recipe = write_tiny_run(tmp_path)
        ended = run(recipe, "training.max_bad_steps=1", 'logging.to=["console"]', fault=("nan_loss", 1, 3))
        assert ended.returncode == 0
        (record,) = metrics(recipe).bad_steps
        assert (record.step, record.ranks, len(record.rows)) == (3, (1,), 4)
        rows = ", ".join(map(str, record.rows))
        note = (
            f"it is not finite on rank 1, among the rows {rows} of the training split (the first is 0); skipped, 1 of"
        )
        assert note in ended.stdout
        losses = {step.step: step.loss for step in metrics(recipe).steps}
        assert [step for step, loss in losses.items() if math.isnan(loss)] == [3]
        assert len(losses) == 8

    @pytest.mark.slow
    @pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.nightly), "zero3"])
    def test_end_the_run_where_none_is_allowed_without_a_restart(self, tmp_path, strategy):
        recipe = write_tiny_run(tmp_path, parallel={"strategy": strategy})
        ended = run(recipe, "checkpoint.every=1 step", "--max-restarts", "2", fault=("nan_loss", 1, 3))
        assert ended.returncode == 3
        assert "restart" not in ended.stderr
        assert "step 3: the loss is nan" in ended.stderr
        assert "not finite on rank 1, among the rows" in ended.stderr
        assert checkpoints(recipe) == [1, 2]


class TestDisks:
    @pytest.mark.parametrize("fault", ["full", pytest.param("gone", marks=pytest.mark.slow)])
    def test_metrics_that_cannot_be_written_end_all_ranks_with_one_message(self, tmp_path, fault):
        recipe = write_tiny_run(tmp_path)
        ended = run(recipe, *ENDLESS, 'logging.to=["console"]', fault=(fault, 0, 3))
        assert ended.returncode == 1
        reason = {"full": "No space left on device", "gone": "No such file or directory"}[fault]
        message = f"{tmp_path}/run/metrics.jsonl can no longer be written ({reason}); make room or restore the folder"
        assert (ended.stdout + ended.stderr).count(message) == 1
        assert "Traceback" not in ended.stderr
        assert "another rank" not in ended.stdout + ended.stderr
        assert "failed after 4 steps" in ended.stdout

    @pytest.mark.slow
    def test_tensorboard_too(self, tmp_path):
        pytest.importorskip("tensorboard")
        ended = run(write_tiny_run(tmp_path), 'logging.to=["console", "tensorboard"]', fault=("full_events", 0, 3))
        assert ended.returncode == 1
        assert "run/tensorboard can no longer be written (No space left on device)" in ended.stderr
        assert "Traceback" not in ended.stderr
        assert "finished" not in ended.stdout
