"""The processes of local ranks: other machines cannot connect to them, and every rendezvous succeeds."""

from __future__ import annotations

import ipaddress
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from tests.helpers import processes, warm
from tests.helpers.hostile import Trap
from tests.helpers.processes import ROOT, finish
from tests.helpers.tiny_run import write_tiny_run

PROGRAM = [sys.executable, ROOT / "tests" / "launch" / "program.py"]


def listening(pid: int) -> list[tuple[str, int]]:
    """Return the addresses and ports on which a process and its descendants listen."""
    process = psutil.Process(pid)
    family = [process, *process.children(recursive=True)]
    found = [connection for member in family for connection in member.net_connections("inet")]
    return [(place.laddr.ip, place.laddr.port) for place in found if place.status == psutil.CONN_LISTEN]


@pytest.mark.slow
def test_nobody_outside_can_connect_to_local_ranks(tmp_path):
    recipe = write_tiny_run(tmp_path, training={"max_steps": 100_000}, evaluation={"every": None})
    process = warm.start(["run", recipe, "--processes", "2"])
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while not (metrics.exists() and '"step": 2,' in metrics.read_text()):
            assert process.poll() is None
            assert time.monotonic() < deadline, "no step was taken"
            time.sleep(0.2)
        places = listening(process.pid)
        assert len(places) >= 3, "the store, and gloo's sockets of two ranks"
        assert all(ipaddress.ip_address(address).is_loopback for address, _ in places), places
        payload = Trap(tmp_path / "marker").pickled()
        # In threads, because gloo never answers a store's client.
        attacks = [threading.Thread(target=_attack, args=(port, payload), daemon=True) for _, port in places]
        for attack in attacks:
            attack.start()
        deadline = time.monotonic() + 5
        for attack in attacks:
            attack.join(max(0.0, deadline - time.monotonic()))
    finally:
        process.send_signal(signal.SIGTERM)
        ended = finish(process, 120)
    assert ended.returncode == 75, ended.stderr
    assert not (tmp_path / "marker").exists()


def _attack(port: int, payload: bytes) -> None:
    """Set the key from which torch's elastic agent would load a pickle, if the port belongs to a store."""
    try:
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=3), wait_for_workers=False)
        store.set("torch.rendezvous.trainer-local", payload)  # type: ignore[arg-type]
    except (dist.DistError, RuntimeError):
        pass


@pytest.mark.slow
def test_many_ranks_meet_at_every_start():
    """A fork of a process with threads can copy a lock that stays locked. Under load, some starts did."""
    starts = 8
    load = [processes.start([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        ended = processes.run([*PROGRAM, "meet", "--processes", "8", "--starts", str(starts)], 280)
    finally:
        for process in load:
            processes.kill(process)
            process.communicate()
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == f"threads at the forks: {[1] * 8 * starts}"


def test_the_error_files_go(tmp_path):
    ended = processes.run([*PROGRAM, "raise", "--processes", "2"], TMPDIR=str(tmp_path))
    assert ended.returncode == 1
    assert list(Path(tmp_path).iterdir()) == []
