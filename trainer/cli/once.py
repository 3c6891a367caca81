"""An error that several ranks of a launcher find: one rank of each machine shows it.

The first rank that finds it does, because the launcher may end the others at once. No rank waits for another.
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import IO

from trainer.base.errors import TrainerError
from trainer.base.scratch import prefix_of
from trainer.cli.options import show_error
from trainer.ranks.environment import detect


def show_error_once(error: TrainerError) -> None:
    """Write the problems of an error to stderr, unless another rank of this launch on this machine has done so."""
    try:
        shown = _shown_errors()
    except (OSError, TrainerError):  # no place for the file, or variables that contradict each other
        shown = None
    if shown is None:
        show_error(error)
        return
    # Only the rank in front of each problem differs between those of a machine.
    text = re.sub(r"^rank \d+ on ", "", str(error), flags=re.MULTILINE)
    digest = sha256(text.encode(errors="replace")).hexdigest()
    with shown:
        if digest not in shown.read().split():
            show_error(error)
            shown.write(f"{digest}\n")


def _shown_errors() -> IO[str] | None:
    """Open and lock the file with the digests of the errors that the ranks of this launch have shown here.

    Its folder belongs to the parent process, the launcher. None: this rank is alone, or a parent that is no launcher
    may start the same command again.

    Raises:
        OSError: the file cannot be made or locked.
        LaunchError: variables of launchers contradict each other.
    """
    environment, launcher = detect(), os.getppid()
    prefix = prefix_of(launcher)
    if environment.local_world_size == 1 or environment.launcher == "variables" or prefix.endswith("--"):
        return None
    folder = Path(tempfile.gettempdir(), f"{prefix}errors")
    folder.mkdir(mode=0o700, exist_ok=True)
    file = (folder / "shown").open("a+", encoding="ascii")
    fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed, or this process is killed
    file.seek(0)
    return file
