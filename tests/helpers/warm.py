"""Starts `trainer` as a process that has imported it already: seconds less for each run, where the start is no matter.

What a user starts, cold, is tested by the tests of the launchers, of the local ranks and of the README.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TextIO

from tests.helpers import processes
from tests.helpers.forking import forking


class WarmProcess:
    """As `subprocess.Popen` with both outputs as pipes of text, as far as tests use it."""

    def __init__(self, arguments: Sequence[str], environment: dict[str, str], faulty: bool) -> None:
        self.args = list(arguments)
        context = forking()
        (out, write_out), (err, write_err) = context.Pipe(duplex=False), context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(self.args, environment, faulty, write_out, write_err))
        self._process.start()
        write_out.close()
        write_err.close()
        self.stdout, self.stderr = _text(out), _text(err)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What is left of both outputs, when the process has ended.

        Raises:
            subprocess.TimeoutExpired: it has not.
        """
        texts = ["", ""]

        def read(index: int, stream: TextIO) -> None:
            texts[index] = stream.read()

        streams = (self.stdout, self.stderr)
        readers = [threading.Thread(target=read, args=pair, daemon=True) for pair in enumerate(streams)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(timeout)
        self._process.join(timeout)
        if self._process.exitcode is None or any(reader.is_alive() for reader in readers):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0, *texts)
        return texts[0], texts[1]


def start(arguments: Sequence[object], faulty: bool = False, **variables: str) -> WarmProcess:
    """Starts `trainer` with these arguments; `faulty` as `faulty_run.py` takes them."""
    return WarmProcess([str(word) for word in arguments], processes.environment(**variables), faulty)


def _text(connection: Connection) -> TextIO:
    stream = os.fdopen(os.dup(connection.fileno()), encoding="utf-8", errors="replace")
    connection.close()
    return stream


def _run(arguments: list[str], environment: dict[str, str], faulty: bool, out: Connection, err: Connection) -> None:
    os.setsid()
    for connection, descriptor in ((out, 1), (err, 2)):
        os.dup2(connection.fileno(), descriptor)
        connection.close()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(processes.ROOT)
    from tests.helpers import faulty_run
    from trainer.cli import main

    sys.argv = ["trainer", *arguments]
    sys.exit(faulty_run.main_with_fault(arguments) if faulty else main(arguments))
