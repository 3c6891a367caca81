"""`python soak.py SECONDS FOLDER`: a long run with memory checkpoints, a mirror and evaluations, and its use of memory.

Every ten seconds, it notes resident memory, open files and threads of each rank as a line of JSON in `FOLDER/samples`.
It then stops the run, and prints the slopes of the second half.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.helpers import processes
from tests.helpers.tiny_run import write_tiny_run
from trainer.observe.heartbeat import read_statuses

_PAUSE_SECONDS = 10.0


def _sample(pid: int) -> dict[str, float]:
    rank = psutil.Process(pid)
    resident = rank.memory_info().rss / 1024
    return {"resident KiB": resident, "open files": rank.num_fds(), "threads": rank.num_threads()}


def soak(seconds: float, folder: Path, recipe: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Train for some seconds, stop, and return the exit code and the samples."""
    run = folder / "run"
    with (folder / "output").open("w") as output:
        command = [sys.executable, "-m", "trainer", "run", recipe, *arguments]
        process = subprocess.Popen(command, env=processes.environment(), stdout=output, stderr=output)
        begun, samples = time.monotonic(), []
        while time.monotonic() < begun + seconds and process.poll() is None:
            time.sleep(_PAUSE_SECONDS)
            for rank, status in read_statuses(run).items():
                second = time.monotonic() - begun
                samples.append({"rank": rank, "second": second, "step": status.step, **_sample(status.pid)})
                with (folder / "samples").open("a") as lines:
                    lines.write(json.dumps(samples[-1]) + "\n")
        (run / "stop").touch()
        process.wait(120)
    return process.returncode, samples


def slopes(samples: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each rank and number: its first and last value, and its slope in an hour by least squares."""
    lines = []
    for rank in sorted({one["rank"] for one in samples}):
        own = [one for one in samples if one["rank"] == rank]
        own = own[len(own) // 2 :]
        hours = np.array([one["second"] / 3600 for one in own])
        for name in ("resident KiB", "open files", "threads", "step"):
            values = np.array([one[name] for one in own])
            slope = np.polyfit(hours, values, 1)[0]
            lines.append(f"rank {rank}: {name} {values[0]:,.0f} to {values[-1]:,.0f}, {slope:+,.1f} an hour")
    return lines


def main(seconds: float, folder: Path) -> int:
    """Soak two ranks."""
    (folder / "memory").mkdir(parents=True)
    recipe = write_tiny_run(
        folder,
        training={"max_steps": 10_000_000},
        evaluation={"every": "100 steps"},
        checkpoint={
            "every": "200 steps",
            "memory": {"every": "20 steps", "folder": "/dev/shm"},
            "mirror": str(folder / "copies"),
        },
        logging={"every": "10 steps", "to": ["console", "jsonl"]},
    )
    code, samples = soak(seconds, folder, recipe, "--processes", "2")
    print(f"exit code {code}", *slopes(samples), sep="\n")
    return code


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), Path(sys.argv[2])))
