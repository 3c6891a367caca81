"""Limits of memory of this process and of its control group, version 2 or 1, as set by a container or a batch system.

Source: the kernel's documentation, admin-guide/cgroup-v2.rst and admin-guide/cgroup-v1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

Read = Callable[[str], str | None]
"""Return the text of a system file by its absolute path; None if it cannot be read."""

_ROOT = "/sys/fs/cgroup"
_UNLIMITED_BYTES = 1 << 60  # version 1 writes a number near 2**63


def read_file(path: str) -> str | None:
    """Return the text of a system file; None if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def memory_bytes(read: Read) -> int | None:
    """Return the limit of memory, or None."""
    texts = [*_values(read, "memory.max"), *_values(read, "memory.limit_in_bytes", "memory")]
    limits = [int(text) for text in texts if text.isdigit()]
    # Without a limit, version 2 writes "max", which is no number.
    return min((limit for limit in limits if limit < _UNLIMITED_BYTES), default=None)


def free_memory_bytes(read: Read = read_file) -> int | None:
    """Return the memory that the limits leave, or None; cached pages of files on disks count as free."""
    room = []
    for controller, names, prefix in (
        (None, ("memory.max", "memory.current"), ""),
        ("memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"),
    ):
        for folder in _folders(read, controller):
            limit, used = (read(f"{folder}/{name}") or "" for name in names)
            if limit.isdigit() and used.isdigit() and int(limit) < _UNLIMITED_BYTES:
                # Pages of files on disks can be dropped at any time, so they count as free.
                lines = (line.partition(" ") for line in (read(f"{folder}/memory.stat") or "").splitlines())
                counts = {name: int(count) for name, _, count in lines if count.isdigit()}
                cached = sum(counts.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
                room.append(max(0, int(limit) - int(used) + cached))
    return min(room, default=None)


def machine_memory_bytes(read: Read = read_file) -> int:
    """Return the memory of this machine, or the least limit of this process or its control group if that is less."""
    import psutil  # here, because the doctor runs without it

    total: int = psutil.virtual_memory().total
    return min(total, memory_bytes(read) or total, *_of_process(read))


def _of_process(read: Read) -> Iterator[int]:
    """Yield the limits of memory that `ulimit -v` and `ulimit -d` set."""
    for line in (read("/proc/self/limits") or "").splitlines():
        if line.startswith(("Max address space ", "Max data size ")):
            # From the right, because names hold blanks: soft limit, hard limit and unit.
            soft = line.split()[-3]
            if soft.isdigit():
                yield int(soft)


def _values(read: Read, name: str, controller: str | None = None) -> Iterator[str]:
    for folder in _folders(read, controller):
        if text := read(f"{folder}/{name}"):
            yield text


def _folders(read: Read, controller: str | None) -> Iterator[str]:
    """Yield the folders of the group and of its parents; each may set limits.

    A controller means version 1, None version 2. In a container the path of the group may lie outside of the mount; the
    top of the mount is then the group.
    """
    for line in (read("/proc/self/cgroup") or "").splitlines():
        number, names, path = line.split(":", 2)
        if controller is None and number == "0":
            top = _ROOT
        elif controller is not None and controller in names.split(","):
            top = f"{_ROOT}/{controller}"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        # From the group up to the root, since each level may have a lower limit.
        for length in range(len(parts), -1, -1):
            yield "/".join([top, *parts[:length]])
