"""Identity of processes and of the system that runs them; Linux only."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def this_machine() -> str:
    """Return the boot and the process namespace of this process, or an empty text on systems other than Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def child_variables() -> dict[str, str]:
    """Return variables with which a child process imports the packages that this process would import.

    A `trainer.py` of the current folder does not run in place of the package.
    """
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}


def ending(code: int) -> str:
    """Return how a process ended, by its exit code in `multiprocessing` or `subprocess`, for messages."""
    if code >= 0:
        return f"exit code {code}"
    return f"signal {signal.Signals(-code).name if -code in set(signal.Signals) else -code}"


def start_of(pid: int) -> str:
    """Return the start of a process in clock ticks since the boot, or an empty text if none runs."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # From the last parenthesis on: the name of the program is in parentheses, and may hold some itself.
    state, *fields = status.rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]  # field 22 of proc(5), `starttime`; a zombie has ended
