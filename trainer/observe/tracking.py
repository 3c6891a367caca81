"""What every experiment tracker has in common: a run that goes on, a thread of its own, errors that end no training.

A tracker is a `Service` behind a `Tracker`. The service speaks to one library and may be slow or fail; the tracker is
the observer, which hands it what happened and never waits for it while the training runs.
"""

from __future__ import annotations

import json
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from trainer.base.disk import replace_text
from trainer.base.errors import TrainerError, UsageError
from trainer.base.text import without_secrets
from trainer.observe.observer import Observer
from trainer.observe.records import EndRecord, EvaluationRecord, RunInfo, StepRecord

IDS_FILE_NAME = "tracking.json"

END_SECONDS = 15.0
_LAST_WORDS_SECONDS = 5.0  # two services in turn end within what ranks get that are asked to stop
"""What a tracker gets at the end of a run to send what is left; a batch system that stops a run allows little more."""

_RETRY_SECONDS = 30.0
_MOST_POINTS = 100_000  # that wait for a service which is away: some tens of megabytes
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


@dataclass(frozen=True)
class Point:
    """Numbers of one step, named as in `metrics.jsonl` with `train/` or `eval/` before."""

    step: int
    values: Mapping[str, float]
    time: float  # seconds since the epoch


class Service(Protocol):
    """One library's way to a tracking server or a local store. Methods may raise anything and take their time."""

    name: str  # as its makers write it
    word: str  # in `logging.to`

    def open(self, run: RunInfo, run_id: str | None) -> str:
        """Begins a tracked run, or goes on with `run_id`; gives its id.

        Raises:
            UsageError: there is no login, or `run_id` is not known.
        """

    def place(self) -> str:
        """Where the run can be looked at, in words; without any secret."""

    def write(self, points: Sequence[Point]) -> None:
        """Adds points in order of their steps; called again with the same ones where it raised."""

    def finish(self, end: EndRecord) -> None:
        """Says how the run ended, and waits at most `END_SECONDS` until everything is sent."""

    def close(self) -> None:
        """Ends every process and connection of the library; may be called twice, and without `finish`."""


class Tracker(Observer):
    """Tells one service what happens.

    Before the first step a service that cannot be used is an error. From then on the service runs in a thread: what it
    cannot take waits and is tried again, with one note, and the training goes on.

    Args:
        service: that keeps the run.
        tell: shows a note to the user.
    """

    def __init__(self, service: Service, tell: Callable[[str], None], retry_seconds: float = _RETRY_SECONDS) -> None:
        self._service, self._tell, self._retry_seconds = service, tell, retry_seconds
        self._inbox: queue.SimpleQueue[Point | EndRecord] = queue.SimpleQueue()
        self._notes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=service.word, daemon=True)
        self._waiting: list[Point] = []
        self._num_lost = 0
        self._has_complained = False

    def start(self, run: RunInfo) -> None:
        """Opens the service, with the run that an earlier part of this run began.

        Raises:
            UsageError: it cannot be used, or the file of ids is damaged.
        """
        ids = _read_ids(run.folder / IDS_FILE_NAME)
        known = ids.get(self._service.word) if run.resumed_from is not None else None
        try:
            run_id = self._service.open(run, known)
            if run_id != known:
                replace_text(run.folder / IDS_FILE_NAME, json.dumps({**ids, self._service.word: run_id}) + "\n")
        except TrainerError:
            raise
        except Exception as error:  # a library may raise anything
            raise UsageError(
                f'`logging.to` holds "{self._service.word}", but {self._service.name} cannot be used'
                f" ({_one_line(error)}); mend that, or take it out of `logging.to`"
            ) from error
        self._notes.put(f"{self._service.name}: {self._service.place()}")
        self._thread.start()

    def doing(self, step: int, what: str) -> None:
        self._pass_notes()

    def step(self, record: StepRecord) -> None:
        values = asdict(record)
        self._put("train", values.pop("step"), values)

    def evaluation(self, record: EvaluationRecord) -> None:
        self._put("eval", record.step, record.metrics)

    def end(self, record: EndRecord) -> None:
        """Waits a little for what is left; says what did not arrive."""
        if self._thread.is_alive():
            self._inbox.put(record)
            self._thread.join(END_SECONDS + _LAST_WORDS_SECONDS)
            if self._thread.is_alive():
                self._notes.put(f"{self._service.name} does not answer; what it lacks is in `metrics.jsonl`")
        self._pass_notes()

    def close(self) -> None:
        if not self._thread.is_alive():
            with suppress(Exception):  # what the service lacks was said
                self._service.close()

    def _put(self, group: str, step: int, values: Mapping[str, float | None]) -> None:
        named = {f"{group}/{name}": value for name, value in values.items() if value is not None}
        self._inbox.put(Point(step, named, time.time()))

    def _pass_notes(self) -> None:
        while not self._notes.empty():
            self._tell(self._notes.get())

    def _work(self) -> None:
        """The thread's life: until the end of the run, or of the process."""
        end: EndRecord | None = None
        while end is None:
            end = self._receive()
            self._write()
        if self._waiting or self._num_lost:
            lost = len(self._waiting) + self._num_lost
            self._notes.put(f"{self._service.name} lacks {lost:,} points of this run, which are in `metrics.jsonl`")
        if self._waiting:
            return  # what takes no points takes no end
        try:
            self._service.finish(end)
        except Exception as error:  # a library may raise anything
            self._notes.put(f"{self._service.name} may lack the end of this run ({_one_line(error)})")

    def _receive(self) -> EndRecord | None:
        """Waits for what is next, and takes all that is there; gives the end of the run, if it has come."""
        try:
            item = self._inbox.get(timeout=self._retry_seconds if self._waiting else None)
            while isinstance(item, Point):
                self._waiting.append(item)
                item = self._inbox.get_nowait()
        except queue.Empty:
            return None
        return item

    def _write(self) -> None:
        if not self._waiting:
            return
        try:
            self._service.write(self._waiting)
        except Exception as error:  # a library may raise anything
            too_many = len(self._waiting) - _MOST_POINTS
            if too_many > 0:
                self._num_lost += too_many
                del self._waiting[:too_many]
            if not self._has_complained:
                self._has_complained = True
                self._notes.put(
                    f"{self._service.name} cannot be written ({_one_line(error)}); the training goes on, and what is"
                    " missing is tried again"
                )
        else:
            self._waiting.clear()


def tracked_config(run: RunInfo) -> dict[str, Any]:
    """What a service shows as the configuration of a run: the resolved recipe, and below `run` how it is spread."""
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
    """The best evaluation, for a service's summary; empty where there was none."""
    return {f"best/{end.best.name}": end.best.value, "best/step": end.best.step} if end.best is not None else {}


def _read_ids(path: Path) -> dict[str, str]:
    """The ids of tracked runs, by the service's word; empty where there is no file.

    Raises:
        UsageError: the file is not one of ours.
    """
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        ids = None
    if isinstance(ids, dict) and all(isinstance(value, str) and _ID.fullmatch(value) for value in ids.values()):
        return ids
    raise UsageError(
        f"`{path}` must name the tracked runs of this folder by their ids, but does not; remove it to begin new ones"
    )


def _one_line(error: Exception) -> str:
    """The beginning of what a library says, without the user and password that a URL may hold."""
    text = without_secrets(" ".join(str(error).split()) or type(error).__name__)
    return text if len(text) <= 200 else f"{text[:200]} ..."
