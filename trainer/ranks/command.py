"""The command that started this run, as a user can paste it into a shell to go on."""

from __future__ import annotations

import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from trainer.ranks.environment import LaunchEnvironment

_LAUNCHERS = ("torchrun", "accelerate", "accelerate-launch", "deepspeed", "trainer")


def command_line(environment: LaunchEnvironment) -> str:
    """What was typed: the command line of the launcher on this machine, or our own where there is none."""
    own = sys.orig_argv
    for process in [*psutil.Process().parents()][:3] if environment.has_ranks else []:
        with suppress(psutil.Error):
            words = process.cmdline()
            if any(Path(word).name in _LAUNCHERS for word in words[:3]):
                own = words
    return shlex.join(_readable(own))


def _readable(words: list[str]) -> list[str]:
    """Without the interpreter, where a console script was started by it."""
    if len(words) > 1 and Path(words[1]).name in _LAUNCHERS:
        return [_shortest(words[1]), *words[2:]]
    return words


def _shortest(script: str) -> str:
    """Its bare name, where that is what the shell would find; else its path, as in `.venv/bin/trainer`."""
    name = Path(script).name
    found = shutil.which(name)
    return name if found and Path(found).resolve() == Path(script).resolve() else script
