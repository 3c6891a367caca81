"""Random faults in tiny trainings, which must then end as if nothing had happened.

    python -m tests.chaos --seed S --cases N [--report FILE] [--workers N]

A case kills a rank, the launcher, a data worker or all processes, lets calls of the C library fail, or damages files of
checkpoints. The training is then started again. It must end with the weights, optimizer state and metrics of the
undisturbed run, bit for bit. Exit codes must be documented ones, no process may be left, and nothing may hang.

`--case K` repeats one case. With `--report FILE`, results go into a file of JSON lines. Cases in the file are not run
again, several calls may share it, and the table covers the whole file. `--store` puts its numbers into
`docs/faults.json`.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import psutil

from tests.chaos.campaign import Campaign, Result
from tests.chaos.features import FEATURES
from tests.helpers.processes import ROOT

FAULTS = ROOT / "docs" / "faults.json"
KINDS = {
    "kill at a moment": "SIGKILL of a rank, the launcher, a data worker or all processes, in each activity of a run",
    "kill at a call": "SIGKILL at a call that changes files, also in the middle of a write",
    "error": "ENOSPC, EDQUOT, EIO, ESTALE, EROFS, EACCES or EPERM of a call, once or from then on",
    "damage": "files of checkpoints, copies, prepared rows or status cut, emptied, flipped, removed, longer or swapped",
}
RESULT = "documented exit codes; the next start ends bit for bit as the undisturbed run, and no process is left"


def table(results: Iterable[Result]) -> Iterator[str]:
    """Yield the lines of the report."""
    results = list(results)
    reached = [one for one in results if one.is_reached]
    failed = [one for one in results if one.problems]
    yield f"{len(results)} cases, {len(reached)} injections, {len(failed)} failed"
    for name in ("kind", "feature"):
        yield f"{name} | injections | failed | not reached"
        for value in sorted({getattr(one, name) for one in results}):
            own = [one for one in results if getattr(one, name) == value]
            counts = (sum(one.is_reached for one in own), sum(bool(one.problems) for one in own))
            yield " | ".join((value, *map(str, counts), str(sum(not one.is_reached for one in own))))
    codes = Counter(str(one.codes[0]) for one in reached if one.kind != "damage")
    yield f"exit codes of disturbed starts: {', '.join(f'{code}: {count}' for code, count in codes.most_common())}"
    yield from (f"case {one.number} ({one.feature}): {one.fault}: {'; '.join(one.problems)}" for one in failed)


def store(results: Iterable[Result], seed: int) -> None:
    """Put the numbers of injections into `docs/faults.json`, in place of those of the last campaign."""
    rows = [row for row in json.loads(FAULTS.read_text(encoding="utf-8")) if "campaign" not in row]
    results = list(results)
    for kind, fault in KINDS.items():
        own = [one for one in results if one.kind == kind and one.is_reached]
        failed = sum(bool(one.problems) for one in own)
        end = f"; {failed} had another end" if failed else ""
        row = {"fault": f"{fault}, in {len(FEATURES)} trainings", "times": len(own), "result": f"{RESULT}{end}"}
        rows.append({**row, "campaign": f"seed {seed}"})
    lines = ",\n".join(f" {json.dumps(row, ensure_ascii=False)}" for row in rows)
    FAULTS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


class Share:
    """The cases of a report that this process takes."""

    def __init__(self, report: Path | None) -> None:
        self._report = report

    def take(self, numbers: Iterable[int]) -> Iterator[int]:
        """Yield the numbers that no process has taken; those of a process that was killed are free again."""
        for number in numbers:
            if self._report is None:
                yield number
                continue
            with self._report.open("a+") as lines:
                fcntl.flock(lines, fcntl.LOCK_EX)
                lines.seek(0)
                entries = [json.loads(line) for line in lines]
                taken = {
                    one["number"] for one in entries if "begun_by" not in one or psutil.pid_exists(one["begun_by"])
                }
                if number in taken:
                    continue
                lines.write(json.dumps({"number": number, "begun_by": os.getpid()}) + "\n")
            yield number

    def add(self, result: Result) -> None:
        """Add a result."""
        if self._report is not None:
            with self._report.open("a") as lines:
                fcntl.flock(lines, fcntl.LOCK_EX)
                lines.write(json.dumps(asdict(result)) + "\n")

    def results(self) -> dict[int, Result]:
        """Return the results of all processes."""
        if self._report is None or not self._report.exists():
            return {}
        entries = [json.loads(line) for line in self._report.read_text().splitlines()]
        return {one["number"]: Result(**one) for one in entries if "begun_by" not in one}


def _beside(workers: int, options: argparse.Namespace, folder: Path) -> None:
    """Run the cases in several processes."""
    words = ["--seed", options.seed, "--first", options.first, "--cases", options.cases, "--report", options.report]
    words += ["--folder", folder, *(word for name in options.feature or () for word in ("--feature", name))]
    command = [sys.executable, "-m", "tests.chaos", *words]
    started = [subprocess.Popen([str(word) for word in command]) for _ in range(workers)]
    for one in started:
        one.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cases, print the table, and return 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--case", type=int, help="the number of the only case")
    parser.add_argument("--report", type=Path, help="a file of JSON lines for the results")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the report")
    parser.add_argument("--store", action="store_true", help="put the numbers into docs/faults.json")
    parser.add_argument("--folder", type=Path, help="for undisturbed runs, which other calls may then use too")
    parser.add_argument("--feature", choices=FEATURES, action="append", help="a training to draw from; all by default")
    options = parser.parse_args(arguments)
    features = options.feature or tuple(FEATURES)
    if options.workers > 1 and options.report is None:
        parser.error("--workers needs --report, which the processes share")
    with tempfile.TemporaryDirectory(prefix="chaos-", dir=_scratch()) as temporary:
        folder = options.folder or Path(temporary)
        share, results = Share(options.report), {}
        if options.workers > 1:
            _beside(options.workers, options, folder)
        else:
            campaign = Campaign(options.seed, folder, features)
            only = [options.case] if options.case is not None else None
            for number in only or share.take(range(options.first, options.first + options.cases)):
                result = results[number] = campaign.run(number)
                share.add(result)
                state = "FAILED" if result.problems else "ok" if result.is_reached else "not reached"
                begins = "resumed" if result.resumes else "new"
                print(
                    f"{number} {state} {result.seconds:.0f} s: {result.feature}, {begins}, {result.restarts} restarts;"
                    f" {result.fault}; {' '.join(map(str, result.codes))}",
                    *result.problems,
                    *([result.output] if only else []),
                    sep="\n  ", flush=True,
                )  # fmt: skip
    results |= share.results()
    if options.case is None:
        print("\n".join(table(results.values())))
    if options.store:
        store(results.values(), options.seed)
    return int(any(result.problems for result in results.values()))


def _scratch() -> str | None:
    """Return a folder in memory if there is one, where saves do not wait for a disk; None: the system's folder."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


if __name__ == "__main__":
    sys.exit(main())
