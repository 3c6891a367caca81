"""Local ranks: their number, output and exit codes, and the handling of the user's signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers import processes, warm
from tests.helpers.processes import ROOT, finish
from tests.observe.test_progress import on_terminal

SPAWNED = ("--spawn",)  # the start method with GPUs; on a CPU, ranks are forks
PROGRAM = [sys.executable, ROOT / "tests" / "launch" / "program.py"]


def start(*arguments: str, **variables: str) -> warm.WarmProcess | subprocess.Popen[str]:
    """Start `program.py`; as a fork, unless its ranks are to import it anew."""
    if "--spawn" in arguments:
        return processes.start([*PROGRAM, *arguments], **variables)
    return warm.start(arguments, program="tests.launch.program:main", **variables)


def program(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return finish(start(*arguments, **variables))


def wait_for(*files: Path) -> None:
    deadline = time.monotonic() + 120
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, f"{files} did not appear"
        time.sleep(0.05)


def test_alone_without_a_number_one_process_runs():
    ended = program("report")
    assert ended.returncode == 0
    assert ended.stdout.count("rank 0 of 1, started by none") == 1


@pytest.mark.parametrize("how", [(), pytest.param(SPAWNED, marks=pytest.mark.nightly)])
def test_local_ranks_start(how):
    ended = program("report", "--processes", "2", *how)
    assert ended.returncode == 0, ended.stderr
    assert "rank 0 of 2, started by trainer" in ended.stdout
    assert "[rank 1] rank 1 of 2, started by trainer" in ended.stdout
    assert ended.stderr == ""


@pytest.mark.slow
def test_the_cores_are_shared_out_to_local_ranks():
    variables = processes.environment()
    del variables["OMP_NUM_THREADS"]
    command = [*map(str, PROGRAM), "report", "--processes", "2"]
    ended = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=240)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert ended.stdout.count(f"threads: {threads}\n") == 2


def test_rank_0_has_the_terminal():
    process, ours = warm.start_on_terminal(["report", "--processes", "2"], program="tests.launch.program:main")
    watchdog = threading.Timer(240, process.kill)
    watchdog.start()
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:  # the other end is closed
        pass
    watchdog.cancel()
    os.close(ours)
    process.join(60)
    assert process.exitcode == 0
    assert b"rank 0 of 2, started by trainer on a terminal: True" in shown
    assert b"[rank 1] rank 1 of 2, started by trainer on a terminal: False" in shown


@pytest.mark.parametrize(
    ("behaviour", "code", "how"),
    [
        ("infinite", 3, ()),
        ("return", 75, ()),
        pytest.param("infinite", 3, SPAWNED, marks=pytest.mark.slow),
    ],
)
def test_the_exit_code_of_the_ranks_is_handed_through(behaviour, code, how):
    assert program(behaviour, "--processes", "2", *how).returncode == code


def test_the_error_of_the_first_failing_rank_is_shown_once():
    ended = program("raise", "--processes", "2")
    assert ended.returncode == 1
    assert "error: rank 1 failed:" in ended.stderr
    assert ended.stderr.count("ValueError: rank 1 cannot divide") == 1
    assert "rank 0 cannot divide" not in ended.stderr
    ended = program("same", "--processes", "2")
    assert ended.returncode == 2
    assert ended.stderr == "error: `task.label` must be a column of the data, but is mood; use label\n"


def test_a_killed_rank_is_named_even_if_another_complains_first():
    ended = program("die", "--processes", "2")
    assert ended.returncode == 1
    assert "rank 1 (process " in ended.stderr
    assert "SIGKILL" in ended.stderr
    assert "connection closed" not in ended.stderr


@pytest.mark.parametrize(
    ("number", "how"),
    [
        (signal.SIGINT, ()),
        pytest.param(signal.SIGTERM, (), marks=pytest.mark.slow),
        (signal.SIGUSR1, ()),
        pytest.param(signal.SIGTERM, SPAWNED, marks=pytest.mark.slow),
    ],
)
def test_a_signal_lets_the_ranks_save(number, how, tmp_path):
    process = start("stop", "--processes", "2", *how, PROGRAM_FOLDER=str(tmp_path))
    wait_for(tmp_path / "ready0", tmp_path / "ready1")
    process.send_signal(number)
    ended = finish(process)
    assert ended.returncode == 75, ended.stderr
    assert (tmp_path / "saved0").exists()
    assert (tmp_path / "saved1").exists()


def test_a_second_interrupt_kills(tmp_path):
    process = start("deaf", "--processes", "2", PROGRAM_FOLDER=str(tmp_path))
    wait_for(tmp_path / "ready0", tmp_path / "ready1")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    ended = finish(process)
    assert ended.returncode == 1
    assert "killed before they had saved" in ended.stderr
    assert not any(psutil.pid_exists(int((tmp_path / f"ready{rank}").read_text())) for rank in range(2))


@pytest.mark.parametrize(
    ("number", "processes"),
    [
        (signal.SIGTERM, "2"),
        (signal.SIGUSR1, "1"),
        pytest.param(signal.SIGTERM, "1", marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, "2", marks=pytest.mark.slow),
    ],
)
def test_a_signal_before_the_first_step_loses_nothing(processes, number, tmp_path):
    process = start("prepare", "--processes", processes, PROGRAM_FOLDER=str(tmp_path))
    wait_for(*(tmp_path / f"ready{rank}" for rank in range(int(processes))))
    process.send_signal(number)
    ended = finish(process, 60)
    assert ended.returncode == 75, ended.stderr
    assert f"stopped by {number.name} before the first step; nothing was lost" in ended.stderr


def test_ranks_stop_when_their_parent_is_killed(tmp_path):
    process = start("stop", "--processes", "2", PROGRAM_FOLDER=str(tmp_path))
    wait_for(tmp_path / "ready0", tmp_path / "ready1")
    process.send_signal(signal.SIGKILL)
    wait_for(tmp_path / "saved0", tmp_path / "saved1")
    finish(process)


def test_ranks_leave_in_silence_when_their_parent_is_killed_before_the_first_step(tmp_path):
    process = start("prepare", "--processes", "2", PROGRAM_FOLDER=str(tmp_path))
    wait_for(tmp_path / "ready0", tmp_path / "ready1")
    process.send_signal(signal.SIGKILL)
    assert finish(process, 60).stderr == ""


@pytest.mark.parametrize(
    ("arguments", "variables", "words"),
    [
        (["--processes", "0"], {}, ["--processes", "0"]),
        (["--processes", "3"], {}, ["`training.global_batch_size`", "3", "30 or 33"]),
        (
            ["--processes", "3"],
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}
            | {"MASTER_PORT": "1"},
            ["--processes is 3", "started 2 ranks"],
        ),
        ([], {"RANK": "0"}, ["RANK set", "WORLD_SIZE"]),
    ],
)
def test_contradictions_are_refused_before_any_start(arguments, variables, words):
    ended = program("report", *arguments, **variables)
    assert ended.returncode == 2
    assert ended.stdout == ""
    for word in words:
        assert word in ended.stderr


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    from trainer.base.errors import LaunchError
    from trainer.launch import local

    monkeypatch.setattr(local, "num_gpus", lambda: 2)
    local._require_devices(2)
    with pytest.raises(LaunchError, match="3 processes need 3 GPUs, but this machine shows 2"):
        local._require_devices(3)


@pytest.mark.parametrize("visible", [1, 2])
def test_ranks_of_a_launcher_may_see_one_gpu_each(monkeypatch, visible):
    """The ranks compare their GPUs when they meet."""
    from trainer.base.errors import LaunchError
    from trainer.launch import local
    from trainer.ranks.environment import LaunchEnvironment
    from trainer.recipe.reading.loading import load_recipe

    ranks = LaunchEnvironment("srun", rank=1, local_rank=1, world_size=4, local_world_size=4)
    monkeypatch.setattr(local, "num_gpus", lambda: visible)
    monkeypatch.setattr(local, "detect", lambda: ranks)
    if visible == 1:
        assert local.plan_start(load_recipe("bert_sample", ()), None, 0) == (ranks, None)
        return
    with pytest.raises(LaunchError, match="4 processes need 4 GPUs, but this machine shows 2"):
        local.plan_start(load_recipe("bert_sample", ()), None, 0)


def test_a_spawned_rank_repeats_registrations(tmp_path, monkeypatch):
    from trainer.base import extensions
    from trainer.launch import attempts
    from trainer.ranks.environment import LaunchEnvironment
    from trainer.recipe.reading.loading import load_recipe

    (tmp_path / "own_recipes.py").write_text(f"import trainer\ntrainer.register_recipes({str(tmp_path)!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(extensions, "_registered", dict(extensions._registered))
    row = ("recipes", str(tmp_path), "own_recipes")

    def job(resolved, environment):
        return int(row[:2] not in extensions._registered)

    work = attempts._Work(load_recipe("bert_sample", ()), job, [row])
    assert attempts._run_rank(work, LaunchEnvironment("none", error_file=tmp_path / "error.json")) == 0


@pytest.mark.slow
def test_each_ending_of_a_restart_has_its_exit_code(tmp_path):
    """Only failures restart, and the last attempt decides. A rank and its launcher end alike."""
    endings = {"1,0": 0, "1,kill,1": 1, "1,2": 2, "1,3": 3, "kill,75": 75, "3": 3}
    started = {}
    for number, behaviour in enumerate(endings):
        folder = tmp_path / str(number)
        folder.mkdir()
        words = (f"end={behaviour}", "--processes", "2", "--max-restarts", "2")
        started[behaviour] = folder, start(*words, PROGRAM_FOLDER=str(folder))
    for behaviour, (folder, process) in started.items():
        ended, attempts = finish(process), behaviour.count(",") + 1
        assert ended.returncode == endings[behaviour], (behaviour, ended.stderr)
        assert len(list(folder.iterdir())) == attempts, behaviour
        assert ended.stderr.count("all ranks start again") == attempts - 1, behaviour


def test_a_hung_run_folder_does_not_hold_the_launcher_after_a_failure():
    ended = finish(start("die", "--processes", "2", "--hung"), timeout_seconds=120)
    assert ended.returncode == 1
    assert "was killed by SIGKILL" in ended.stderr


@pytest.mark.slow
def test_the_cursor_comes_back_after_a_killed_rank():
    """A second Ctrl-C kills ranks too, and a killed rank 0 cannot show the cursor that its bar hid."""
    code = """
import os, signal, sys
from trainer.base.errors import TrainerError
from trainer.launch.local import run_or_join
from trainer.recipe.reading.loading import load_recipe

def job(resolved, environment):
    os.write(1, b"\\x1b[?25l")
    os.kill(os.getpid(), signal.SIGKILL)

try:
    run_or_join(load_recipe("bert_sample", ()), 2, job=job)
except TrainerError as error:
    print(error)
"""
    output = on_terminal(code)
    assert "was killed by SIGKILL" in output
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")


@pytest.mark.parametrize(("gpus", "method"), [(0, "fork"), (1, "spawn"), (8, "spawn")])
def test_ranks_with_gpus_are_no_forks(monkeypatch, gpus, method):
    """CUDA that is in use does not survive a fork."""
    from trainer.launch import local

    monkeypatch.setattr(local.sys, "platform", "linux")
    monkeypatch.setattr(local, "num_gpus", lambda: gpus)
    assert local._start_method() == method
