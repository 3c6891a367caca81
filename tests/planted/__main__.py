"""Plants each defect of the table into a copy of the source, and shows which test catches it.

    python -m tests.planted [--only NAME ...] [--list] [--report FILE] [--tree FOLDER]

The selections of a package run once without any defect first. Each defect then has a process of its own, forked from
one that holds torch and transformers but no module of the trainer: it imports the changed module, then runs the tests
of the row. A defect that no test catches, that cannot be imported or that hangs ends the command with exit code 1.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.planted.defect import ROOT, Defect
from tests.planted.table import DEFECTS

SECONDS_OF_A_DEFECT = 240.0
SECONDS_OF_THE_SELECTIONS = 1200.0
PRELOADED = (
    *("torch", "torch.distributed", "torch.nn.parallel", "transformers", "datasets", "tokenizers", "safetensors.torch"),
    *("hypothesis", "pydantic", "psutil", "sklearn.metrics", "scipy.stats", "typer", "rich.progress", "yaml"),
    *("transformers.models.auto.modeling_auto", "transformers.models.bert.modeling_bert", "accelerate"),
)
CANNOT_IMPORT, CRASHED = 90, 91


@dataclass
class Outcome:
    """The end of one run of pytest."""

    code: int | None  # None: it ran out of time
    seconds: float
    failed: list[str] = field(default_factory=list)
    output: str = ""

    @property
    def is_green(self) -> bool:
        return self.code == 0

    @property
    def catcher(self) -> str | None:
        """The test that failed first; None where the defect is not a valid one or survives."""
        return self.failed[0] if self.code == 1 and self.failed else None

    def __str__(self) -> str:
        if self.code is None:
            return "ran out of time"
        known = {0: "SURVIVED", CANNOT_IMPORT: "cannot be imported", CRASHED: "the runner failed"}
        return self.catcher or known.get(self.code, f"pytest ended with {self.code}")


class _Failures:
    """A plugin of pytest that writes the names of failed tests to a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._names: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and report.nodeid not in self._names:
            self._names.append(report.nodeid)
            self._file.write_text(json.dumps(self._names), encoding="utf-8")


def copied(tree: Path, place: Path) -> None:
    """Copy the files that git knows, and new ones that it does not ignore."""
    listing = ["git", "-C", str(tree), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listing, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (tree / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, place / name)


@contextmanager
def planted(defect: Defect, tree: Path, turn: int) -> Iterator[None]:
    """Inside, the tree holds the defect."""
    file = tree / "trainer" / defect.file
    before, times = file.read_text(encoding="utf-8"), file.stat()
    file.write_text(defect.planted(before), encoding="utf-8")
    os.utime(file, (turn, turn))  # compiled files are told apart by seconds and size
    try:
        yield
    finally:
        file.write_text(before, encoding="utf-8")
        os.utime(file, (times.st_atime, times.st_mtime))


def tested(tree: Path, tests: Sequence[str], module: str | None, seconds: float, first_only: bool) -> Outcome:
    """Run pytest in a process of its own, and end all that it started."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        failures, output = Path(folder) / "failures.json", Path(folder) / "output"
        start = time.monotonic()
        child = os.fork()
        if child == 0:
            _test(tree, tests, module, failures, output, first_only)
        code = _waited(child, start + seconds)
        failed = json.loads(failures.read_text(encoding="utf-8")) if failures.exists() else []
        text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
        return Outcome(code, time.monotonic() - start, failed, text)


def _waited(child: int, deadline: float) -> int | None:
    """Return the exit code of a child, or None where it was killed at the deadline."""
    seen: dict[int, psutil.Process] = {}
    try:
        while time.monotonic() < deadline:
            with suppress(psutil.Error):
                seen |= {process.pid: process for process in psutil.Process(child).children(recursive=True)}
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.1)
        return None
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        for process in seen.values():
            with suppress(psutil.Error):
                process.kill()
        with suppress(ChildProcessError):
            os.waitpid(child, 0)


def _test(tree: Path, tests: Sequence[str], module: str | None, failures: Path, output: Path, first_only: bool) -> None:
    """Run pytest in this process, and leave."""
    code = CRASHED
    try:
        os.setsid()
        file = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.chdir(tree)
        os.environ |= {"PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        sys.path[:] = [str(tree), *(path for path in sys.path if path and Path(path).resolve() != ROOT)]
        for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "trainer", "conftest")]:
            del sys.modules[name]
        sys.argv[:] = ["pytest"]
        code = CANNOT_IMPORT
        if module is not None:
            importlib.import_module(module)
        code = CRASHED
        options = ["-q", "-p", "no:cacheprovider", f"--rootdir={tree}", "--tb=short", *(["-x"] if first_only else [])]
        code = int(pytest.main([*options, *(f"tests/{test}" for test in tests)], plugins=[_Failures(failures)]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def chosen(patterns: Sequence[str]) -> list[Defect]:
    """The defects that a name, a package or a pattern of either selects."""
    if not patterns:
        return list(DEFECTS)
    return [d for d in DEFECTS if any(fnmatch(d.name, p) or fnmatch(d.package, p) for p in patterns)]


def run(defects: Sequence[Defect], tree: Path, report: Path | None) -> bool:
    """Return whether every defect is caught; those that have their row in the report are left out."""
    known = report.read_text(encoding="utf-8") if report is not None and report.exists() else ""
    defects = [defect for defect in defects if f"| {defect.name} |" not in known]
    os.environ["OMP_NUM_THREADS"] = "1"  # read by torch's import; a rank that is forked beside OpenMP's threads hangs
    for name in PRELOADED:
        importlib.import_module(name)
    green: set[str] = set()
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="planted-tree-") as folder:
        place = Path(folder).resolve() / "tree"
        copied(tree, place)
        for package in dict.fromkeys(defect.package for defect in defects):
            own = [defect for defect in defects if defect.package == package]
            selections = list(dict.fromkeys(test for defect in own for test in defect.tests if test not in green))
            if selections:  # pytest would run all tests for none
                clean = tested(place, selections, None, SECONDS_OF_THE_SELECTIONS, first_only=False)
                if not clean.is_green:
                    print(clean.output[-4000:])
                    print(f"{package}: the selections are not green without a defect", flush=True)
                    failed += [defect.name for defect in own]
                    continue
                green |= set(selections)
                print(f"{package}: {len(selections)} selections are green without a defect ({clean.seconds:.0f} s)")
            for defect in own:
                with planted(defect, place, 1_000_000_000 + DEFECTS.index(defect)):
                    outcome = tested(place, defect.tests, defect.module, SECONDS_OF_A_DEFECT, first_only=True)
                print(f"{defect.package:<11} {defect.name:<42} {outcome.seconds:6.1f} s  {outcome}", flush=True)
                if outcome.catcher is None:
                    failed.append(defect.name)
                    print(outcome.output[-3000:], flush=True)
                if report is not None:
                    _add_row(report, defect, outcome)
    print(f"{len(defects) - len(failed)} of {len(defects)} defects are caught" + "".join(f"\n  {n}" for n in failed))
    return not failed


def _add_row(report: Path, defect: Defect, outcome: Outcome) -> None:
    if not report.exists():
        report.write_text("| defect | package | caught by | seconds |\n|---|---|---|---|\n", encoding="utf-8")
    with report.open("a", encoding="utf-8") as file:
        file.write(f"| {defect.name} | {defect.package} | {outcome} | {outcome.seconds:.1f} |\n")


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description="Which test catches which defect?")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a defect, a package or a pattern")
    parser.add_argument("--list", action="store_true", help="show the defects and leave")
    parser.add_argument("--report", type=Path, metavar="FILE", help="add a row for each defect that has none here")
    parser.add_argument("--tree", type=Path, default=ROOT, metavar="FOLDER", help="another checkout to plant into")
    arguments = parser.parse_args()
    defects = chosen(arguments.only)
    if arguments.list:
        for defect in defects:
            print(f"{defect.package:<11} {defect.name:<42} {defect.sentence}")
        return 0
    return 0 if defects and run(defects, arguments.tree.resolve(), arguments.report) else 1


if __name__ == "__main__":
    sys.exit(main())
