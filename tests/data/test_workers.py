from __future__ import annotations

import os
import signal
import time
from multiprocessing import active_children
from pathlib import Path

import pytest

from tests.helpers import warm
from tests.helpers.forking import forked_children
from trainer.base.errors import DataError
from trainer.data.workers import ordered_results


def begin_and_die(_: list[str]) -> None:
    results = ordered_results(lambda item: bytes(1 << 20), range(100), 3, "key")
    next(results)
    print(*(child.pid for child in active_children()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def test_results_come_in_order_and_an_error_in_its_place():
    def square(item: int) -> int:
        if item == 7:
            raise DataError(f"bad {item}")
        return item * item

    for processes in (1, 3):
        found = []
        with pytest.raises(DataError, match="bad 7"):
            found.extend(ordered_results(square, range(20), processes, "key"))
        results = ordered_results(square, range(20), processes, "key")
        assert [next(results) for _ in range(7)] == [item * item for item in range(7)]
        results.close()
        assert not forked_children()


def test_a_bug_keeps_its_trace():
    with pytest.raises(ZeroDivisionError) as raised:
        list(ordered_results(lambda item: 1 / item, range(4), 2, "data.preparation_processes"))
    assert "test_workers.py" in str(raised.value.__cause__)


def test_processes_end_with_their_killed_parent():
    killed = warm.start([], program=f"{__name__}:begin_and_die")
    stdout, stderr = killed.communicate(60)
    assert killed.returncode == -signal.SIGKILL, stderr
    workers = [int(pid) for pid in stdout.split()]
    assert len(workers) == 3
    deadline = time.monotonic() + 30
    while alive := [pid for pid in workers if Path(f"/proc/{pid}").exists() and not is_zombie(pid)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


def is_zombie(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
