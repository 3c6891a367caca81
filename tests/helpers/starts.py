"""`python starts.py NUMBER RANKS FOLDER`: runs of one step on some local ranks, one after the other.

It prints a line for each start that fails, and the numbers at the end.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

from tests.helpers import processes, warm
from tests.helpers.tiny_run import write_tiny_run


def main(number: int, ranks: int, folder: Path) -> int:
    """Start runs, and return the number of failures."""
    recipe = write_tiny_run(folder, training={"max_steps": 1}, evaluation={"every": None})
    failures, seconds = 0, []
    for start in range(number):
        begun = time.monotonic()
        place = f"checkpoint.folder={folder / f'run{start}'}"
        process = warm.start(["run", recipe, "--processes", str(ranks), place])
        ended = processes.finish(process)  # type: ignore[arg-type]
        seconds.append(time.monotonic() - begun)
        if ended.returncode:
            failures += 1
            print(f"start {start}: exit code {ended.returncode}\n{ended.stdout}\n{ended.stderr}", flush=True)
        if start % 20 == 19:
            print(f"{start + 1} starts, {failures} failures, median {statistics.median(seconds):.1f} s", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
