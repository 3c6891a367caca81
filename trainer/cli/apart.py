"""A command in a process of its own, for the functions of the Python interface (`tools/apart.py`)."""

from __future__ import annotations

import sys
from pathlib import Path

from trainer.cli.program import answer
from trainer.tools.apart import do

if __name__ == "__main__":
    sys.exit(do(Path(sys.argv[1]), lambda job: answer(job["arguments"])))
