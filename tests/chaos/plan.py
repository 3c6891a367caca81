"""The plan of one fault, which a run and all its processes share with `interpose.c`.

This module imports neither torch nor trainer.
"""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
from enum import IntEnum, IntFlag
from pathlib import Path

_MOST_PIDS = 1024
_NUMBERS = (
    *("records", "depth", "rank", "calls", "nth", "error", "target", "lasting"),
    *("count", "fired", "launcher", "num_pids"),
)


class Call(IntFlag):
    """Calls of the C library, by their effect on files."""

    READS = 1
    OPENS = 2  # to write
    WRITES = 4
    SYNCS = 8
    RENAMES = 16
    MAKES = 32  # folders
    REMOVES = 64


class Target(IntEnum):
    """The process that a kill hits; beside these, a child of the process."""

    ITSELF = 0
    LAUNCHER = 1
    ALL = 2


_CHANGES = Call.OPENS | Call.WRITES | Call.RENAMES | Call.MAKES | Call.REMOVES
ERRORS: dict[int, tuple[Call, Call]] = {
    errno.ENOSPC: (Call.OPENS | Call.WRITES | Call.SYNCS | Call.MAKES, Call.OPENS | Call.WRITES | Call.MAKES),
    errno.EDQUOT: (Call.OPENS | Call.WRITES | Call.SYNCS | Call.MAKES, Call.OPENS | Call.WRITES | Call.MAKES),
    errno.EIO: (_CHANGES | Call.SYNCS | Call.READS, _CHANGES | Call.SYNCS | Call.READS),
    errno.ESTALE: (_CHANGES | Call.SYNCS | Call.READS, _CHANGES | Call.SYNCS | Call.READS),
    errno.EROFS: (_CHANGES & ~Call.WRITES, _CHANGES & ~Call.WRITES),
    errno.EACCES: (_CHANGES & ~Call.WRITES | Call.READS, _CHANGES & ~Call.WRITES),
    errno.EPERM: (_CHANGES & ~Call.WRITES, _CHANGES & ~Call.WRITES),
}
"""The calls that may fail with an error number, and those that fail from then on where it lasts."""
OF_PATHS = frozenset((errno.EROFS, errno.EACCES, errno.EPERM))
"""Errors that exit code 2 may report; the others may pass, and have exit code 1."""


class Plan(ctypes.Structure):
    """`struct plan` of `interpose.c`."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in _NUMBERS),
        ("pids", ctypes.c_int32 * _MOST_PIDS),
        *((name, ctypes.c_char * 512) for name in ("root", "place", "disk")),
    )

    @property
    def processes(self) -> list[int]:
        """The process numbers of the run so far."""
        return list(self.pids[: min(self.num_pids, _MOST_PIDS)])


def read(file: Path) -> Plan:
    """Return the present state of the plan in a file."""
    return Plan.from_buffer_copy(file.read_bytes())


def write(file: Path, **values: int | bytes) -> None:
    """Write a plan with these fields."""
    file.write_bytes(bytes(Plan(**values)))


def library(folder: Path) -> Path:
    """Return `interpose.c` as a library, which is compiled into a folder once."""
    built = folder / "interpose.so"
    if not built.exists():
        source = Path(__file__).with_name("interpose.c")
        temporary = folder / f"interpose-{os.getpid()}.so"
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", temporary, source, "-ldl"], check=True, timeout=120)
        temporary.rename(built)
    return built
