from __future__ import annotations

from types import SimpleNamespace

import pytest

from trainer.base import cgroup

GIB = 2**30
V2 = {"/proc/self/cgroup": "0::/kubepods/pod7"}
V1 = {"/proc/self/cgroup": "4:cpu,cpuacct:/docker/ab\n5:memory:/docker/ab\n6:pids:/docker/ab\n1:name=systemd:/x"}


@pytest.mark.parametrize(
    ("files", "memory"),
    [
        ({}, None),
        (V2, None),
        (
            V2
            | {
                "/sys/fs/cgroup/kubepods/pod7/memory.max": "1073741824",
                "/sys/fs/cgroup/kubepods/memory.max": "max",
            },
            GIB,
        ),
        ({"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/memory.max": "1073741824"}, GIB),
        (
            V1
            | {
                "/sys/fs/cgroup/memory/docker/ab/memory.limit_in_bytes": str(GIB),
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            },
            GIB,
        ),
        # the path of the group is not mounted
        (V1 | {"/sys/fs/cgroup/memory/memory.limit_in_bytes": str(GIB)}, GIB),
        (V1 | {"/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}, None),
    ],
)
def test_the_limit_of_memory_of_the_control_group(files: dict[str, str], memory: int | None):
    assert cgroup.memory_bytes(files.get) == memory


def test_process_limits_equal_the_limits_of_the_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=9 * GIB))
    limits = "Max data size    unlimited    unlimited    bytes\nMax address space    {}    unlimited    bytes\n"
    found = [
        cgroup.machine_memory_bytes({"/proc/self/limits": limits.format(soft)}.get) for soft in ("unlimited", 2 * GIB)
    ]
    assert found == [9 * GIB, 2 * GIB]


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
def test_the_memory_that_the_control_group_leaves(files: dict[str, str], free: int | None):
    assert cgroup.free_memory_bytes(files.get) == free
