from __future__ import annotations

import os
import resource
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.tools.doctor.machines import answers, machine
from trainer.base import cgroup
from trainer.tools.doctor import system
from trainer.tools.doctor.finding import GIB, MIB

V2 = {"/proc/self/cgroup": "0::/kubepods/pod7"}
V1 = {"/proc/self/cgroup": "4:cpu,cpuacct:/docker/ab\n5:memory:/docker/ab\n6:pids:/docker/ab\n1:name=systemd:/x"}


@pytest.mark.parametrize(
    ("files", "num_cores", "memory", "processes"),
    [
        ({}, None, None, None),
        (V2, None, None, None),
        (
            V2
            | {
                "/sys/fs/cgroup/kubepods/pod7/cpu.max": "max 100000",
                "/sys/fs/cgroup/kubepods/cpu.max": "150000 100000",
                "/sys/fs/cgroup/kubepods/pod7/memory.max": "1073741824",
                "/sys/fs/cgroup/kubepods/memory.max": "max",
                "/sys/fs/cgroup/kubepods/pod7/pids.max": "500",
            },
            1.5,
            GIB,
            500,
        ),
        ({"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/cpu.max": "200000 100000"}, 2.0, None, None),
        (
            V1
            | {
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000",  # the path of the group is not mounted
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
                "/sys/fs/cgroup/memory/docker/ab/memory.limit_in_bytes": str(GIB),
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
                "/sys/fs/cgroup/pids/docker/ab/pids.max": "max",
            },
            0.5,
            GIB,
            None,
        ),
        (
            V1
            | {
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            None,
            None,
            None,
        ),
    ],
)
def test_the_limits_of_the_control_group(tmp_path: Path, files: dict[str, str], num_cores, memory, processes):
    at = machine(tmp_path, files=files)
    assert (cgroup.num_cores(at.read), cgroup.memory_bytes(at.read), cgroup.num_processes(at.read)) == (
        num_cores,
        memory,
        processes,
    )


@pytest.mark.parametrize(
    ("files", "free"),
    [
        (V2, None),
        (V2 | {"/sys/fs/cgroup/memory.max": "max", "/sys/fs/cgroup/memory.current": "5"}, None),
        (
            V2
            | {
                "/sys/fs/cgroup/memory.max": "1000",
                "/sys/fs/cgroup/memory.current": "700",
                "/sys/fs/cgroup/memory.stat": "anon 400\nshmem 200\ninactive_file 60\nactive_file 40",
                "/sys/fs/cgroup/kubepods/memory.max": "900",
                "/sys/fs/cgroup/kubepods/memory.current": "650",
            },
            250,
        ),
        (
            V1
            | {
                "/sys/fs/cgroup/memory/docker/ab/memory.limit_in_bytes": "1000",
                "/sys/fs/cgroup/memory/docker/ab/memory.usage_in_bytes": "700",
                "/sys/fs/cgroup/memory/docker/ab/memory.stat": "inactive_file 9\ntotal_inactive_file 100",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
                "/sys/fs/cgroup/memory/memory.usage_in_bytes": "9000",
            },
            400,
        ),
    ],
)
def test_the_memory_that_the_control_group_leaves(tmp_path: Path, files: dict[str, str], free):
    assert cgroup.free_memory_bytes(machine(tmp_path, files=files).read) == free


def test_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 96)
    assert answers(system.cores, machine(tmp_path)) == ("ok", "64 of 96")
    few = V2 | {"/sys/fs/cgroup/cpu.max": "350000 100000"}
    value = "64 of 96, but the control group allows 3.5"
    assert answers(system.cores, machine(tmp_path, files=few)) == ("warning", value)
    assert answers(system.cores, machine(tmp_path, OMP_NUM_THREADS="1"))[0] == "ok"


@pytest.mark.parametrize(
    ("available", "limit", "status", "value"),
    [
        (20, None, "ok", "32.0 GiB, 20.0 GiB free"),
        (1, None, "warning", "32.0 GiB, 1.0 GiB free"),
        (20, 8, "ok", "32.0 GiB, 20.0 GiB free, but the control group allows 8.0 GiB"),
        (20, 1, "warning", "32.0 GiB, 20.0 GiB free, but the control group allows 1.0 GiB"),
        (20, 64, "ok", "32.0 GiB, 20.0 GiB free"),
    ],
)
def test_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available: int, limit: int | None, status, value):
    memory = SimpleNamespace(total=32 * GIB, available=available * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    files = V2 | ({"/sys/fs/cgroup/memory.max": str(limit * GIB)} if limit else {})
    assert answers(system.memory, machine(tmp_path, files=files)) == (status, value)


@pytest.mark.parametrize(
    ("total", "free", "status", "value"),
    [
        (64 * MIB, 64 * MIB, "warning", "64 MiB, 64 MiB free"),  # as Docker gives it
        (512 * MIB, 500 * MIB, "warning", "512 MiB, 500 MiB free"),
        (8 * GIB, 7 * GIB, "ok", "8.0 GiB, 7.0 GiB free"),
        (8 * GIB, 10 * MIB, "warning", "8.0 GiB, 10 MiB free"),
    ],
)
def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, free: int, status, value):
    of_disk = SimpleNamespace(f_frsize=4096, f_blocks=total // 4096, f_bavail=free // 4096)
    monkeypatch.setattr(os, "statvfs", lambda path: of_disk)
    at = machine(tmp_path, files={"/dev/shm/": ""})
    assert answers(system.shared_memory, at) == (status, value)


def test_shared_memory_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert answers(system.shared_memory, machine(tmp_path))[0] == "ok"  # another system than Linux
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert answers(system.shared_memory, machine(tmp_path, files={"/dev/shm/": ""}))[0] == "problem"


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, int]]:
    """The limits of this process; a test may change them."""
    values: dict[int, tuple[int, int]] = {}
    monkeypatch.setattr(resource, "getrlimit", values.__getitem__)
    return values


def test_open_files(limits):
    limits[resource.RLIMIT_NOFILE] = (256, 4096)
    assert answers(system.open_files, machine()) == ("warning", "256 (can be raised to 4,096)")
    limits[resource.RLIMIT_NOFILE] = (1024, resource.RLIM_INFINITY)
    assert answers(system.open_files, machine()) == ("ok", "1,024 (can be raised to unlimited)")


def test_processes(limits, tmp_path: Path):
    limits[resource.RLIMIT_NPROC] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert answers(system.processes, machine(tmp_path)) == ("ok", "unlimited")
    few = V2 | {"/sys/fs/cgroup/pids.max": "100"}
    value = "unlimited, 100 in the control group"
    assert answers(system.processes, machine(tmp_path, files=few)) == ("warning", value)
    limits[resource.RLIMIT_NPROC] = (512, 512)
    assert answers(system.processes, machine(tmp_path / "other")) == ("warning", "512")


def test_locked_memory_matters_to_infiniband_alone(limits, tmp_path: Path):
    limits[resource.RLIMIT_MEMLOCK] = (64 * MIB, 64 * MIB)
    assert answers(system.locked_memory, machine(tmp_path)) == ("ok", "64 MiB")
    adapter = {"/sys/class/infiniband/mlx5_0/": ""}
    assert answers(system.locked_memory, machine(tmp_path, files=adapter)) == ("warning", "64 MiB, with InfiniBand")
    limits[resource.RLIMIT_MEMLOCK] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert answers(system.locked_memory, machine(tmp_path)) == ("ok", "unlimited")
