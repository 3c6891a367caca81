"""The probe: a process for questions that may hang or crash, with a time limit for each answer."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TypeVar

from trainer.tools.doctor.asking import KINDS, answer
from trainer.tools.doctor.facts import ExerciseFacts, Facts, TorchFacts

Kind = TypeVar("Kind", bound=Facts)


class ProbeError(Exception):
    """The facts of `kind` are not available, for the reason in the message."""

    def __init__(self, message: str, kind: type[Facts]) -> None:
        super().__init__(message)
        self.kind = kind


class Probe:
    """A fork of this process that asks one kind after the other; start it before any thread.

    Args:
        deep: whether to use the GPUs.
    """

    def __init__(self, deep: bool) -> None:
        self._kinds = tuple(kind for kind in KINDS if deep or kind is not ExerciseFacts)
        self._known: dict[type[Facts], Facts | ProbeError] = {}
        self._arrived = {kind: threading.Event() for kind in self._kinds}
        context = multiprocessing.get_context("fork")
        receive, send = context.Pipe(duplex=False)
        limit = sum(kind.limit for kind in self._kinds)
        self._process = context.Process(target=answer, args=(send, self._kinds, limit), daemon=True)
        self._process.start()
        send.close()
        threading.Thread(target=self._collect, args=(receive,), daemon=True).start()

    def facts(self, kind: type[Kind]) -> Kind:
        """Return facts by their kind; wait until they arrive.

        Raises:
            ProbeError: they are not available.
        """
        self._arrived[kind].wait()
        known = self._known[kind]
        if isinstance(known, ProbeError):
            raise known
        assert isinstance(known, kind)
        return known

    def close(self) -> None:
        """End the process and its children."""
        pid = self._process.pid
        with suppress(ProcessLookupError, PermissionError):
            if pid is not None and os.getpgid(pid) == pid:  # it already leads its own group
                os.killpg(pid, signal.SIGKILL)
        self._process.kill()
        self._process.join(1)

    def _collect(self, connection: Connection) -> None:
        for index, kind in enumerate(self._kinds):
            try:
                answer = self._receive(connection, kind)
            except ProbeError as ended:
                missed, error = self._kinds[index:], ended
            else:
                self._put(kind, answer if isinstance(answer, Facts) else ProbeError(answer, kind))
                if isinstance(answer, Facts) or kind is not TorchFacts:
                    continue
                missed, error = self._kinds[1:], ProbeError(answer, kind)  # all other questions need torch
            self.close()
            for other in missed:
                self._put(other, error)
            return

    def _receive(self, connection: Connection, kind: type[Facts]) -> Facts | str:
        try:
            if connection.poll(kind.limit):
                answer: Facts | str = connection.recv()
                return answer
        except (EOFError, OSError):
            self._process.join(1)
            code = self._process.exitcode
            how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
            raise ProbeError(f"{kind.question} ended the process {how}", kind) from None
        raise ProbeError(f"{kind.question} did not end within {kind.limit:.0f} s", kind)

    def _put(self, kind: type[Facts], known: Facts | ProbeError) -> None:
        self._known[kind] = known
        self._arrived[kind].set()
