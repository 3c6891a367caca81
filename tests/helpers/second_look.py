"""A pytest run that repeats failed tests once, alone: `python -m tests.helpers.second_look ARGUMENT ...`.

Tests can fail beside others on a machine with more work than cores. One worker runs them again, and this second run
decides the exit code. It lists the tests that pass now; such a test should get the marker `alone`. More than
`MOST_TESTS` failures are not repeated and fail the run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import ROOT

MOST_TESTS = 15


class _SecondLook:
    """The plugin of the second run, which lists the tests that passed alone before pytest's own summary."""

    def __init__(self, failed: Sequence[str]) -> None:
        self._failed = failed

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        stats = terminalreporter.stats
        again = {report.nodeid for kind in ("failed", "error") for report in stats.get(kind, [])}
        passed = {report.nodeid for report in stats.get("passed", [])} - again
        terminalreporter.section("second look")
        for words, names in (
            ("failed beside other tests, passed alone", [name for name in self._failed if name in passed]),
            ("failed beside other tests and alone", [name for name in self._failed if name not in passed]),
        ):
            if names:
                terminalreporter.write_line(f"{words}: {', '.join(names)}")


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Return pytest's exit code, from the second run if there was one.

    Args:
        arguments: The pytest arguments of the first run.
        root: The folder in which pytest runs, with its configuration and its cache.
    """
    last_failed = root / ".pytest_cache" / "v" / "cache" / "lastfailed"
    last_failed.unlink(missing_ok=True)
    code = subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=root, check=False).returncode
    failed = sorted(json.loads(last_failed.read_text())) if last_failed.exists() else []
    if code != pytest.ExitCode.TESTS_FAILED or not 0 < len(failed) <= MOST_TESTS:
        return code
    print(f"\n{len(failed)} tests failed beside others and are run again alone:", *failed, sep="\n  ", flush=True)
    os.chdir(root)
    return int(pytest.main(["-p", "no:xdist", *failed], plugins=[_SecondLook(failed)]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
