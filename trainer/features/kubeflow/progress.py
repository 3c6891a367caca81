"""The observer that reports progress and metrics of a run to its TrainJob.

A thread writes the newest status, at most once in five seconds. The training never waits for it, but the end of the run
does for some seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from trainer.features.kubeflow.server import StatusError, StatusServer
from trainer.observe.builders import ObserverParts
from trainer.observe.observer import NumberObserver
from trainer.observe.records import EndRecord, RunInfo, StepRecord
from trainer.observe.thread_notes import ThreadNotes

INTERVAL_SECONDS = 5.0  # between two requests; the guide of Kubeflow asks for as much
RETRY_SECONDS = 30.0
END_SECONDS = 8.0
"""Time limit for the last status; a batch system that stops a run allows little more."""

_MOST_METRICS = 256
_MOST_LETTERS = 64  # both by the schema of a TrainJob
_LONGEST_SECONDS = 2**31 - 1


def observer(parts: ObserverParts) -> TrainJobProgress | None:
    """Return the observer of rank 0; None on other ranks."""
    return None if parts.environment.rank else TrainJobProgress(StatusServer.of_environment(), parts.note)


class TrainJobProgress(NumberObserver):
    """Observer that writes `status.trainerStatus`; a failure is one note, and later statuses are tried again.

    Args:
        note: shows a note to the user.
        interval_seconds: the least time between two requests.
        retry_seconds: the least time after a failed one.
    """

    def __init__(
        self,
        server: StatusServer,
        note: Callable[[str], None],
        interval_seconds: float = INTERVAL_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self._server, self._notes = server, ThreadNotes(note)
        self._interval_seconds, self._retry_seconds = interval_seconds, retry_seconds
        self._newest: dict[str, Any] | None = None  # replaced as a whole, so that the thread needs no lock
        self._changed, self._ended = threading.Event(), threading.Event()
        # A daemon, because a server that does not answer must not keep the process from its end.
        self._thread = threading.Thread(target=self._work, name="TrainJob", daemon=True)
        self._metrics: dict[str, str] = {}
        self._total = self._first_step = self._step = 0
        self._began = 0.0

    def start(self, run: RunInfo) -> None:
        self._total, self._first_step = run.total_steps, run.resumed_from or 0
        self._step, self._began = self._first_step, time.monotonic()
        self._report()
        self._thread.start()

    def doing(self, step: int, what: str) -> None:
        self._notes.show()

    def step(self, record: StepRecord) -> None:
        self._step = record.step
        super().step(record)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            is_full = len(self._metrics) == _MOST_METRICS and name not in self._metrics
            if len(name) > _MOST_LETTERS or is_full:
                self._notes.put_once(
                    "left out",
                    f"the status of the TrainJob leaves out {name!r} and further metrics: it holds {_MOST_METRICS} with"
                    f" names of at most {_MOST_LETTERS} characters",
                )
            else:
                self._metrics[name] = str(value) if isinstance(value, int) else f"{value:.6g}"
        self._report()

    def end(self, record: EndRecord) -> None:
        """Write the last status; wait a limited time for the server."""
        if self._thread.is_alive():  # the thread never began if `start` failed
            self._step = record.step
            self._report(has_finished=record.outcome == "finished", has_ended=True)
            self._ended.set()
            self._changed.set()
            self._thread.join(END_SECONDS)
            if self._thread.is_alive():
                self._complain("the server does not answer")
        self._notes.show()

    def _report(self, has_finished: bool = False, has_ended: bool = False) -> None:
        percentage = 100 if has_finished else min(99, 100 * self._step // max(1, self._total))
        status: dict[str, Any] = {"progressPercentage": percentage}
        done = self._step - self._first_step
        if has_finished:
            status["estimatedRemainingSeconds"] = 0
        elif done and not has_ended:  # with the time of evaluations and checkpoints
            left = (time.monotonic() - self._began) / done * max(0, self._total - self._step)
            status["estimatedRemainingSeconds"] = min(_LONGEST_SECONDS, round(left))
        metrics = [{"name": name, "value": value} for name, value in self._metrics.items()]
        self._newest = {**status, "metrics": metrics, "lastUpdatedTime": datetime.now(UTC).isoformat()}
        self._changed.set()

    def _work(self) -> None:
        is_last = False
        while not is_last:
            self._changed.wait()
            self._changed.clear()
            is_last = self._ended.is_set()  # before the status is read, which `end` has set before
            pause = self._interval_seconds
            try:
                assert self._newest is not None
                self._server.write(self._newest)
            except StatusError as error:
                self._complain(str(error))
                pause = self._retry_seconds
            except Exception as error:  # a failure of the report must not end the run, whatever it is
                self._complain(type(error).__name__)
                pause = self._retry_seconds
            if not is_last:
                self._ended.wait(pause)

    def _complain(self, reason: str) -> None:
        self._notes.put_once(
            "complaint",
            f"the status of the TrainJob cannot be written ({reason}); training continues, and later progress is"
            " tried again",
        )
