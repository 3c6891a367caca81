"""DeepSpeed's operation for CPUs: who compiles it, and who waits for whom."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.base.errors import TrainerError, UsageError
from trainer.engine import deepspeed_package
from trainer.engine.deepspeed_package import CPU_OPERATION, prebuilt_operations, ready_deepspeed

ROOT = Path(__file__).resolve().parents[2]
COMPILES = """
import sys
from pathlib import Path
from trainer.engine.deepspeed_package import build_lock
lock = build_lock(Path(sys.argv[1]))
assert lock.try_take()
print(lock.owner(), flush=True)
sys.stdin.read()
"""
HAS_OPEN = "import sys; file = open(sys.argv[1], 'x'); print(flush=True); sys.stdin.read(1)"


def package(**operations: bool) -> Any:
    """A DeepSpeed of which these operations were built, or not, when it was installed."""
    return SimpleNamespace(git_version_info=SimpleNamespace(installed_ops=operations))


@pytest.fixture
def loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A folder for builds, and whether torch's lock was there at each load."""
    lock, found = torch_lock(tmp_path), []
    lock.parent.mkdir(parents=True)
    monkeypatch.setenv("LOCAL_RANK", "0")  # put back afterwards, since the function sets it
    monkeypatch.setattr(deepspeed_package, "import_deepspeed", lambda: package(**{CPU_OPERATION: False}))
    monkeypatch.setattr(deepspeed_package, "missing_tools", lambda: [])
    monkeypatch.setattr(deepspeed_package, "build_root", lambda: tmp_path)
    monkeypatch.setattr(deepspeed_package, "_load", lambda: found.append(lock.exists()))
    monkeypatch.setattr(deepspeed_package, "_QUIET_SECONDS", 0.0)
    return found


def torch_lock(folder: Path) -> Path:
    return folder / "py311_cpu" / CPU_OPERATION / "lock"


@contextmanager
def process(program: str, argument: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that runs until its input ends, and its first line."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", program, str(argument)]
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdout is not None
        try:
            yield child, child.stdout.readline().strip()
        finally:
            child.kill()


def test_operations_that_were_built_at_installation():
    assert prebuilt_operations(package(fused_adam=True, cpu_adam=False)) == {"fused_adam"}


def test_a_compiler_is_asked_for_only_where_something_is_compiled(loads, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(deepspeed_package, "missing_tools", lambda: ["g++"])
    with pytest.raises(UsageError, match=r"but g\+\+ is not on the PATH"):
        ready_deepspeed(0, on_cpu=True)
    assert ready_deepspeed(0, on_cpu=False)
    built = package(**{CPU_OPERATION: True})
    monkeypatch.setattr(deepspeed_package, "import_deepspeed", lambda: built)
    assert ready_deepspeed(0, on_cpu=True) is built
    assert loads == []


def test_the_lock_of_a_killed_build_is_removed_at_once(tmp_path, loads, capfd):
    """Torch would wait for it without end and without a word."""
    torch_lock(tmp_path).touch()
    ready_deepspeed(1, on_cpu=True)
    assert loads == [False]
    assert f"removed {torch_lock(tmp_path)}: the build that held it was killed" in capfd.readouterr().err
    assert list(tmp_path.glob(".*")) == []


def test_a_lock_of_another_machine_stays_where_files_cannot_be_locked(tmp_path, loads, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(next(iter(deepspeed_package.UNSUPPORTED)), "No locks available")

    monkeypatch.setattr("fcntl.lockf", refuse)
    torch_lock(tmp_path).touch()
    with pytest.raises(TrainerError, match="if no other machine compiles there, delete the file"):
        ready_deepspeed(0, on_cpu=True)
    assert loads == []


def test_a_build_of_another_program_is_waited_for(tmp_path, loads, capfd, monkeypatch):
    with process(HAS_OPEN, torch_lock(tmp_path)) as (other, _):

        def end(seconds: float) -> None:
            other.kill()
            other.wait()

        monkeypatch.setattr(deepspeed_package.time, "sleep", end)
        ready_deepspeed(0, on_cpu=True)
        assert loads == [False]
        assert f"waiting for process {other.pid} on this machine, which compiles" in capfd.readouterr().err


@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_wait_names_the_process_that_compiles_and_ends_by_a_signal(tmp_path, loads, capfd, local_rank):
    def leave(*_: object) -> None:
        sys.exit(75)

    previous = signal.signal(signal.SIGALRM, leave)
    with process(COMPILES, tmp_path) as (other, owner):
        try:
            signal.setitimer(signal.ITIMER_REAL, 1.0)
            with pytest.raises(SystemExit):
                ready_deepspeed(local_rank, on_cpu=True)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        told = capfd.readouterr().err
        assert f"process {other.pid} on" in owner
        assert told == ("" if local_rank else f"waiting for {owner}, which compiles {CPU_OPERATION}\n")
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        ready_deepspeed(local_rank, on_cpu=True)  # the lock of a killed owner is free
    assert loads == [False]
