"""`python signalled_imports.py EVERY SIGNAL NAME ...` is `trainer ...`, and signals at the imports of its start.

At every EVERY-th import, and at each import of NAME, a fork of the process gets the signal. The process waits for its
end, prints the name of the module with the exit code and the message of the fork as a line of JSON, and goes on.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Sequence
from types import ModuleType

_SECONDS = 30.0
_BEFORE_TRAINING = "stop_before_training"


class Signals:
    """A finder of modules that finds none, and lets a fork die at some of the questions to it."""

    def __init__(self, every: int, number: signal.Signals, name: str) -> None:
        self._every = every
        self._number = number
        self._name = name
        self._count = 0

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Let a fork get the signal, as long as the run has not begun to train."""
        if _BEFORE_TRAINING not in getattr(signal.getsignal(self._number), "__qualname__", ""):
            return
        self._count += 1
        if self._count % self._every and name != self._name:
            return
        source, sink = os.pipe()
        child = os.fork()
        if not child:
            os.dup2(sink, 2)
            self._every, self._name = sys.maxsize, ""
            os.kill(os.getpid(), self._number)
            return
        os.close(sink)
        said = b""
        while select.select([source], [], [], _SECONDS)[0] and (part := os.read(source, 2**16)):
            said += part
        os.close(source)
        os.kill(child, signal.SIGKILL)  # one that goes on; it changes no code of one that has ended
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(1, json.dumps([name, code, said.decode(errors="replace")]).encode() + b"\n")


if __name__ == "__main__":
    sys.meta_path.insert(0, Signals(int(sys.argv[1]), signal.Signals[sys.argv[2]], sys.argv[3]))  # type: ignore[arg-type]
    sys.argv[:] = ["trainer", *sys.argv[4:]]
    from trainer.__main__ import main

    sys.exit(main())
