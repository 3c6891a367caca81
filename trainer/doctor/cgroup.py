"""Limits of this process's control group, version 2 or 1, as set by a container or a batch system.

Source: the kernel's documentation, admin-guide/cgroup-v2.rst and admin-guide/cgroup-v1.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainer.doctor.machine import Machine

_ROOT = "/sys/fs/cgroup"
_UNLIMITED_BYTES = 1 << 60  # version 1 writes a number near 2**63


def num_cores(machine: Machine) -> float | None:
    """Return the limit of processor time in cores, or None."""
    limits = []
    for text in _values(machine, "cpu.max"):
        quota, _, period = text.partition(" ")
        if quota.isdigit() and period.isdigit():
            limits.append(int(quota) / int(period))
    for folder in _folders(machine, "cpu"):
        quota, period = (machine.read(f"{folder}/cpu.cfs_{name}_us") or "" for name in ("quota", "period"))
        if quota.isdigit() and period.isdigit():  # no limit is -1
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def memory_bytes(machine: Machine) -> int | None:
    """Return the limit of memory, or None."""
    texts = [*_values(machine, "memory.max"), *_values(machine, "memory.limit_in_bytes", "memory")]
    limits = [int(text) for text in texts if text.isdigit()]
    return min((limit for limit in limits if limit < _UNLIMITED_BYTES), default=None)


def num_processes(machine: Machine) -> int | None:
    """Return the limit of processes and threads, or None."""
    texts = [*_values(machine, "pids.max"), *_values(machine, "pids.max", "pids")]
    return min(map(int, filter(str.isdigit, texts)), default=None)


def _values(machine: Machine, name: str, controller: str | None = None) -> Iterator[str]:
    for folder in _folders(machine, controller):
        if text := machine.read(f"{folder}/{name}"):
            yield text


def _folders(machine: Machine, controller: str | None) -> Iterator[str]:
    """Yield the folder of the group and its parents, each of which may set limits.

    A controller means version 1, None version 2. In a container the path of the group may lie outside of the mount; the
    top of the mount is then the group.
    """
    for line in (machine.read("/proc/self/cgroup") or "").splitlines():
        number, names, path = line.split(":", 2)
        if controller is None and number == "0":
            top = _ROOT
        elif controller is not None and controller in names.split(","):
            top = f"{_ROOT}/{controller}"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for length in range(len(parts), -1, -1):
            yield "/".join([top, *parts[:length]])
