"""Runs pytest, and runs a few tests that failed once more, alone: `python -m tests.helpers.second_look ARGUMENT ...`.

Tests that failed beside other tests, on a machine with more work than cores, are run again by one worker, and this run
decides. It names those that pass now, so that nothing is hidden. A test that passes only alone gets the marker `alone`.
More than `MOST_TESTS` failures are no accident and decide at once.
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
    """The plugin of the second run: says which tests passed alone, before pytest's own summary."""

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
    """Return the exit code: pytest's, of the second run where there was one.

    Args:
        arguments: pytest's, of the first run.
        root: where pytest runs, with its configuration and its cache.
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
