"""Folders for temporary files that the next start removes if their process was killed."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from os import getpid
from pathlib import Path

from trainer.base.processes import start_of, this_machine

_PREFIX = "trainer-"
_NAME = re.compile(_PREFIX + r"(?P<machine>[0-9a-f]{8})-(?P<pid>\d+)-(?P<start>\d*)-\w+")


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a temporary folder for the block; before, remove those of killed processes of this machine."""
    if this_machine():  # else processes of different machines look alike
        _remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=prefix_of(getpid())) as name:
        yield Path(name)


def prefix_of(pid: int) -> str:
    """Return the start of the names of a process's temporary folders; without a start, it ends in `--`."""
    return f"{_PREFIX}{sha256(this_machine().encode()).hexdigest()[:8]}-{pid}-{start_of(pid)}-"


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(prefix_of(0).removesuffix("0--") + "*"):  # no process has the number 0
        match = _NAME.fullmatch(folder.name)
        # A process with this number but another start is a later one.
        if match and start_of(int(match["pid"])) != match["start"]:
            shutil.rmtree(folder, ignore_errors=True)
