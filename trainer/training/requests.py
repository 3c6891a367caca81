"""The requests of callbacks, which all ranks obey after the same step."""

from __future__ import annotations

from dataclasses import replace

from trainer.observe.observer import Request, joined
from trainer.parallel.mesh import ParallelMesh


class Requests:
    """The requests of the callbacks on all ranks. A run without callbacks exchanges nothing.

    Args:
        has_callbacks: whether the run has any; the same on all ranks.
    """

    def __init__(self, mesh: ParallelMesh, has_callbacks: bool) -> None:
        self._mesh = mesh
        self._has_callbacks = has_callbacks
        self._answers: list[Request] = []

    def add(self, answer: Request | None) -> None:
        """Add this rank's answer to an event that all ranks report."""
        self._answers.append(replace(answer, log={}) if answer else Request())

    def agreed(self) -> Request:
        """Return the requests of any rank since the last call, without numbers. All ranks must call it."""
        answers, self._answers = self._answers, []
        if not (answers and self._has_callbacks):  # the same on all ranks, because they report the same events
            return Request()
        own = joined(answers) or Request()
        evaluate, save, stop = self._mesh.agree_any(own.evaluate, own.save, own.stop)
        return Request(evaluate, save, stop)
