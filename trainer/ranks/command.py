"""The command that started this run, for a shell."""

from __future__ import annotations

import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from trainer.base.text import without_secrets
from trainer.ranks.environment import LaunchEnvironment

_LAUNCHERS = ("torchrun", "accelerate", "accelerate-launch", "deepspeed", "trainer")


def command_line(environment: LaunchEnvironment) -> str:
    """Return the command line of the launcher on this machine, or that of this process."""
    original = sys.orig_argv
    for process in [*psutil.Process().parents()][:3] if environment.has_ranks else []:
        with suppress(psutil.Error):
            words = process.cmdline()
            if any(Path(word).name in _LAUNCHERS for word in words[:3]):
                original = words
    if len(original) > 1 and Path(original[1]).name in _LAUNCHERS:
        original = [_shortest(original[1]), *original[2:]]
    return without_secrets(shlex.join(original))


def _shortest(script: str) -> str:
    """Return the bare name if the shell finds this script by it, else the path, as in `.venv/bin/trainer`."""
    name = Path(script).name
    path = shutil.which(name)
    return name if path and Path(path).resolve() == Path(script).resolve() else script
