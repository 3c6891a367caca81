"""Seconds from `trainer run` to the end of its first step, compared with those of the imports alone.

The baseline is one new process per rank, started at the same time. Each imports torch, datasets, and transformers'
BERT class and tokenizer loader. Runs and baselines alternate; the tokenised data is cached. From the root of the
repository:

    python -m tests.benchmarks.startup --processes 1 2 --rounds 5
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.helpers.processes import finish, kill, start

IMPORTS = """\
import torch, datasets
from transformers import AutoTokenizer, BertForSequenceClassification
print("step 1", flush=True)
"""
OVERRIDES = ("training.max_steps=1", "evaluation.every=null", "logging.every=1 step", "checkpoint.resume=never")


@dataclass(frozen=True)
class Cost:
    """The elapsed time since the start of the first process, and the CPU time of all processes."""

    seconds: float
    cpu_seconds: float


def measure(commands: Sequence[Sequence[str]]) -> Cost:
    """Start the commands at once, and wait until each prints a line that begins with "step 1"."""
    begin = time.perf_counter()
    processes = [start(command) for command in commands]
    try:
        for process in processes:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line.startswith("step 1"):
                    break
            else:
                raise RuntimeError("".join([*lines, *(process.stderr or [])]))
        cost = Cost(time.perf_counter() - begin, sum(_cpu_seconds(process.pid) for process in processes))
        for process in processes:
            finish(process)
    except BaseException:
        for process in processes:
            kill(process)
        raise
    return cost


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and its living descendants."""
    parent = psutil.Process(pid)
    times = [process.cpu_times() for process in (parent, *parent.children(recursive=True))]
    return sum(t.user + t.system + t.children_user + t.children_system for t in times)


def trainer(processes: int, folder: Path, run: str) -> list[str]:
    """Return the command that trains the sample for one step of at least 48 rows in its own folder."""
    places = [f"checkpoint.folder={folder / run}", f"data.cache={folder / 'cache'}"]
    places += [f"training.global_batch_size={processes * -(-48 // processes)}"]
    command = [sys.executable, "-m", "trainer", "run", "bert_sample", *OVERRIDES, *places]
    return [*command, "--processes", str(processes)]


def compare(processes: int, num_rounds: int, folder: Path) -> str:
    """Measure, and return a row of the report."""
    measure([trainer(processes, folder, "warm-up")])  # fills the cache of tokenised data and the page cache
    imports, runs = [], []
    for number in range(num_rounds):
        imports.append(measure([[sys.executable, "-c", IMPORTS]] * processes))
        runs.append(measure([trainer(processes, folder, f"round-{number}")]))
    cells = [str(processes)]
    for costs in ([c.seconds for c in imports], [c.seconds for c in runs]):
        cells.append(f"{statistics.median(costs):.2f} ({min(costs):.2f} to {max(costs):.2f})")
    for kind in ("seconds", "cpu_seconds"):
        added = [getattr(run, kind) - getattr(baseline, kind) for run, baseline in zip(runs, imports, strict=True)]
        cells.append(f"{statistics.median(added):.2f} ({min(added):.2f} to {max(added):.2f})")
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=5, help="runs, and as many baselines")
    options = parser.parse_args(arguments)
    print("| processes | imports, s | start to first step, s | added, s | added, processor time of all ranks, s |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for processes in options.processes:
            print(compare(processes, options.rounds, Path(folder) / str(processes)), flush=True)


if __name__ == "__main__":
    main()
