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
    own = sys.orig_argv
    for process in [*psutil.Process().parents()][:3] if environment.has_ranks else []:
        with suppress(psutil.Error):
            words = process.cmdline()
            if any(Path(word).name in _LAUNCHERS for word in words[:3]):
                own = words
    if len(own) > 1 and Path(own[1]).name in _LAUNCHERS:
        own = [_shortest(own[1]), *own[2:]]
    return without_secrets(shlex.join(own))


def _shortest(script: str) -> str:
    """Return the bare name if the shell finds this script by it, else the path, as in `.venv/bin/trainer`."""
    name = Path(script).name
    found = shutil.which(name)
    return name if found and Path(found).resolve() == Path(script).resolve() else script
