"""Fixtures for tests of launchers."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.helpers import processes


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """A list of the processes that a test starts, which are killed after the test."""
    both: list[subprocess.Popen[str]] = []
    yield both
    for process in both:
        processes.kill(process)
