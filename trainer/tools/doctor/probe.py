"""The probe: a process for questions that may hang or crash, with a time limit for each answer."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TypeVar

from trainer.tools.doctor.asking import KINDS, answer
from trainer.tools.doctor.facts import Facts, TorchFacts

Kind = TypeVar("Kind", bound=Facts)


class ProbeError(Exception):
    """The facts of `kind` are not available, for the reason in the message; `ends`: nor are those of later kinds."""

    def __init__(self, message: str, kind: type[Facts], ends: bool = False) -> None:
        super().__init__(message)
        self.kind, self.ends = kind, ends


class Probe:
    """A fork of this process that asks one kind after the other; start it before any thread."""

    def __init__(self) -> None:
        self._facts: dict[type[Facts], Future[Facts]] = {kind: Future() for kind in KINDS}
        context = multiprocessing.get_context("fork")
        receive, send = context.Pipe(duplex=False)
        limit = sum(kind.limit for kind in KINDS)
        self._process = context.Process(target=answer, args=(send, KINDS, limit), daemon=True)
        self._process.start()
        # The child then has the only open end, so that its death ends `recv` with an error.
        send.close()
        threading.Thread(target=self._collect, args=(receive,), daemon=True).start()

    def facts(self, kind: type[Kind]) -> Kind:
        """Return facts by their kind; wait until they arrive.

        Raises:
            ProbeError: they are not available.
        """
        found = self._facts[kind].result()
        assert isinstance(found, kind)
        return found

    def close(self) -> None:
        """End the process and its children."""
        pid = self._process.pid
        with suppress(ProcessLookupError, PermissionError):
            if pid is not None and os.getpgid(pid) == pid:  # it already leads its own group
                os.killpg(pid, signal.SIGKILL)
        self._process.kill()
        self._process.join(1)

    def _collect(self, connection: Connection) -> None:
        ended: ProbeError | None = None
        for kind, facts in self._facts.items():
            try:
                if ended is not None:
                    raise ended
                facts.set_result(self._receive(connection, kind))
            except ProbeError as error:
                facts.set_exception(error)
                if error.ends and ended is None:
                    self.close()
                    ended = error

    def _receive(self, connection: Connection, kind: type[Facts]) -> Facts:
        try:
            if not connection.poll(kind.limit):
                raise ProbeError(f"{kind.question} did not end within {kind.limit:.0f} s", kind, ends=True)
            answer: Facts | str = connection.recv()
        except (EOFError, OSError):
            self._process.join(1)
            code = self._process.exitcode
            how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
            raise ProbeError(f"{kind.question} ended the process {how}", kind, ends=True) from None
        if isinstance(answer, str):
            raise ProbeError(answer, kind, ends=kind is TorchFacts)  # all other questions need torch
        return answer
