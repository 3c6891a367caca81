"""Tests in Triton's interpreter, which Triton chooses when it is imported: they run in a process of their own."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.helpers import processes


def run_interpreted(file: Path, timeout_seconds: float = 300, marks: str = "not nightly") -> None:
    """Run the tests of a file with these marks in Triton's interpreter, and require that they pass."""
    command = [sys.executable, "-m", "pytest", file, "-q", "-m", marks, "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = processes.run(command, timeout_seconds, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
