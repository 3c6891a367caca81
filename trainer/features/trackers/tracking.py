"""The common part of experiment trackers: resumed runs, a separate thread, and errors that do not end the training.

A tracker is an observer, `Tracker`, with a `Service`. The service calls one library and may be slow or fail. The
`Tracker` passes records to it and never waits for it during training.
"""

from __future__ import annotations

import json
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from trainer.base.disk import read_plain, replace_text
from trainer.base.errors import TrainerError, UsageError, storage_error
from trainer.base.text import without_secrets
from trainer.observe.observer import NumberObserver
from trainer.observe.records import EndRecord, RunInfo
from trainer.observe.thread_notes import ThreadNotes

IDS_FILE_NAME = "tracking.json"

END_SECONDS = 15.0
_LAST_WORDS_SECONDS = 5.0  # two services in turn end within the time limit of ranks that must stop
"""Time limits for remaining points at the end of a run; a batch system that stops a run allows little more."""

_RETRY_SECONDS = 30.0
_MOST_POINTS = 100_000  # maximum in the queue of an unreachable service: some tens of megabytes
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


@dataclass(frozen=True)
class Point:
    """Numbers of one step by name, as of `NumberObserver`."""

    step: int
    values: Mapping[str, float]
    time: float  # seconds since the epoch


class Service(Protocol):
    """Access to a tracking server or a local store with one library. Methods may raise any error and may be slow."""

    name: str  # the official name
    word: str  # its value in `logging.to`

    def open(self, run: RunInfo, run_id: str | None) -> tuple[str, int]:
        """Start a tracked run, or resume `run_id`; return its id, and the first step to write: it holds earlier ones.

        Raises:
            UsageError: there is no login, or `run_id` is unknown.
        """

    def place(self) -> str:
        """Return a description of the place of the tracked run, without secrets."""

    def write(self, points: Sequence[Point]) -> None:
        """Write points in order of their steps; after an error, it is called again with the same points."""

    def finish(self, end: EndRecord) -> None:
        """Write the outcome of the run, and wait at most `END_SECONDS` until all data is sent."""

    def close(self) -> None:
        """End all processes and connections of the library; may be called twice, and without `finish`."""


class Tracker(NumberObserver):
    """Observer that passes records to one service.

    At the start of a run, an unusable service is an error. After that, the service runs in a thread. Failed points are
    queued and written again, the user gets one note, and the training continues. This holds for a resumed run from its
    beginning, since its service was usable before.

    Args:
        retry_seconds: the maximum time between two attempts to write.
    """

    def __init__(self, service: Service, note: Callable[[str], None], retry_seconds: float = _RETRY_SECONDS) -> None:
        self._service, self._notes, self._retry_seconds = service, ThreadNotes(note), retry_seconds
        self._inbox: queue.SimpleQueue[Point | EndRecord] = queue.SimpleQueue()
        # A daemon, because a service that does not answer must not keep the process from its end.
        self._thread = threading.Thread(target=self._work, name=service.word, daemon=True)
        self._waiting: list[Point] = []
        self._first_step = 0
        self._num_lost = 0
        self._open: Callable[[], None] | None = None  # for the thread, if the service was away at the start

    def start(self, run: RunInfo) -> None:
        """Open the service, with the tracked run of an earlier part of this run.

        Raises:
            UsageError: the service has no login or no such run, or the file of ids is damaged.
            TrainerError: the service of a new run cannot be used.
        """
        known = _read_ids(run.folder / IDS_FILE_NAME).get(self._service.word) if run.resumed_from is not None else None
        try:
            self._open_run(run, known)
        except TrainerError:
            raise
        except Exception as error:  # a library may raise anything
            if known is None:
                raise TrainerError(
                    f'`logging.to` holds "{self._service.word}", but {self._service.name} cannot be used'
                    f" ({_one_line(error)}); fix that, or remove it from `logging.to`"
                ) from error
            self._open = partial(self._open_run, run, known)
            self._complain(error)
        self._thread.start()

    def _open_run(self, run: RunInfo, known: str | None) -> None:
        """Open the service, and keep the id of a new tracked run."""
        run_id, self._first_step = self._service.open(run, known)
        # Stored before the first point, so that a run that is killed now continues the same tracked run.
        if run_id != known:
            path = run.folder / IDS_FILE_NAME
            replace_text(path, json.dumps({**_read_ids(path), self._service.word: run_id}) + "\n")
        self._open = None
        self._notes.put(f"{self._service.name}: {self._service.place()}")

    def doing(self, step: int, what: str) -> None:
        self._notes.show()

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        self._inbox.put(Point(step, values, time.time()))

    def end(self, record: EndRecord) -> None:
        """Wait a limited time for remaining points, and report missing ones."""
        # The thread never began if `start` failed.
        if self._thread.is_alive():
            self._inbox.put(record)
            self._thread.join(END_SECONDS + _LAST_WORDS_SECONDS)
            if self._thread.is_alive():
                self._notes.put(f"{self._service.name} does not answer; missing points are in `metrics.jsonl`")
        self._notes.show()

    def close(self) -> None:
        if not self._thread.is_alive():
            with suppress(Exception):  # missing points are already reported
                self._service.close()

    def _work(self) -> None:
        end: EndRecord | None = None
        while end is None:
            end = self._receive()
            self._write()
        if self._waiting or self._num_lost:
            lost = len(self._waiting) + self._num_lost
            self._notes.put(f"{self._service.name} lacks {lost:,} points of this run, which are in `metrics.jsonl`")
        if self._waiting or self._open:
            return  # a service that rejects points rejects the end too
        try:
            self._service.finish(end)
        except Exception as error:  # a library may raise anything
            self._notes.put(f"{self._service.name} may lack the end of this run ({_one_line(error)})")

    def _receive(self) -> EndRecord | None:
        """Wait for the next item, and take all items of the queue; return the end of the run if it is among them."""
        try:
            # Only points that wait for the service need another attempt; else the thread sleeps until the next item.
            item = self._inbox.get(timeout=self._retry_seconds if self._waiting or self._open else None)
            while isinstance(item, Point):
                self._waiting.append(item)
                item = self._inbox.get_nowait()
        except queue.Empty:
            return None
        return item

    def _write(self) -> None:
        if not (self._waiting or self._open):
            return
        try:
            if self._open:
                self._open()
            if self._waiting:
                # A resumed run repeats steps that the service has already.
                self._service.write([point for point in self._waiting if point.step >= self._first_step])
        except Exception as error:  # a library may raise anything
            too_many = len(self._waiting) - _MOST_POINTS
            if too_many > 0:
                self._num_lost += too_many
                # The oldest points go first; `metrics.jsonl` has them all.
                del self._waiting[:too_many]
            self._complain(error)
        else:
            self._waiting.clear()

    def _complain(self, error: Exception) -> None:
        self._notes.put_once(
            "complaint",
            f"{self._service.name} cannot be written ({_one_line(error)}); training continues, and missing points are"
            " retried",
        )


def tracked_config(run: RunInfo) -> dict[str, Any]:
    """Return the configuration of a run for a service: the resolved recipe, and facts of the run under `run`."""
    facts = (
        "layout",
        "batch",
        "world_size",
        "device",
        "launcher",
        "num_train_rows",
        "num_validation_rows",
        "steps_per_epoch",
        "total_steps",
        "recipe_hash",
    )
    return {**run.recipe, "run": {**{name: getattr(run, name) for name in facts}, "versions": dict(run.versions)}}


def best_values(end: EndRecord) -> dict[str, float]:
    """Return the best evaluation for a service's summary; empty if there is none."""
    return {f"best/{end.best.name}": end.best.value, "best/step": end.best.step} if end.best is not None else {}


def _read_ids(path: Path) -> dict[str, str]:
    """Return the ids of tracked runs by the `word` of the service; empty if the file does not exist.

    Raises:
        UsageError: the file is not one that `Tracker` writes, or its path does not allow reading.
        TrainerError: the storage failed.
    """
    try:
        ids = json.loads(read_plain(path))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise storage_error(
            f"`{path}` must name the tracked runs of this folder, but cannot be read ({error}); start again when its"
            " storage works, or remove it to begin new ones",
            error,
        ) from error
    except (ValueError, RecursionError):
        ids = None
    if isinstance(ids, dict) and all(isinstance(value, str) and _ID.fullmatch(value) for value in ids.values()):
        return ids
    raise UsageError(
        f"`{path}` must name the tracked runs of this folder by their ids, but does not; remove it to begin new ones"
    )


def _one_line(error: Exception) -> str:
    """Return the start of a library's message on one line, without the user and password of a URL."""
    text = without_secrets(" ".join(str(error).split()) or type(error).__name__)
    return text if len(text) <= 200 else f"{text[:200]} ..."
