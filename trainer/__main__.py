"""The program that `trainer` and `python -m trainer` start."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from threading import Timer

from trainer.base import collector
from trainer.base.collisions import refuse_collisions
from trainer.base.errors import TrainerError

_SECONDS = 0.05  # until an interrupt is sent again


def main() -> int:
    """Run the command line in a process of its own."""
    try:
        try:
            refuse_collisions(Path(__file__).parents[1])
            return answer()
        finally:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python would answer it with a traceback while it shuts down
    except KeyboardInterrupt:  # it came after the answer
        return 130
    except TrainerError as error:  # of an import, such as two folders that register one name
        from trainer.base.terminal import say

        say(f"error: {error}", err=True)
        return error.exit_code
    finally:
        collector.end()


def answer() -> int:
    """Run the command line; signals during the first imports have their later meaning."""
    _leave_current_folder()
    if "run" in sys.argv[1:3]:  # deepspeed puts a `--local_rank` before it
        from trainer.ranks.stopping import stop_before_training

        with stop_before_training(interrupts=True):
            return _command_line()
    return _command_line()


def _command_line() -> int:
    try:
        from trainer.base.terminal import guard
        from trainer.cli import main as command_line

        guard()
        sys.unraisablehook = _interrupt_again
        return command_line()
    except KeyboardInterrupt:
        return 130


def _interrupt_again(unraisable: sys.UnraisableHookArgs) -> None:
    """Send an interrupt again that compiled code of pydantic has dropped; show another exception as Python does."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        # After this function, in which Python drops an exception, too.
        Timer(_SECONDS, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(unraisable)


def _leave_current_folder() -> None:
    """Take the folder that `python -m` adds off the path: a `datasets.py` there would replace the package.

    A checkout that is not installed is itself found in that folder.
    """
    if sys.flags.safe_path:  # `python -P` adds none
        return
    with suppress(OSError):  # the current folder may be gone
        here = os.getcwd()
        if sys.path[0] == here and Path(__file__).resolve().parents[1] != Path(here).resolve():
            del sys.path[0]


if __name__ == "__main__":
    sys.exit(main())
