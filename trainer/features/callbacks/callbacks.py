"""Callbacks: classes of users that follow a run, and ask it to evaluate, save, stop or log numbers.

To its run, a callback is one more observer.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from trainer.base.errors import TrainerError, UsageError
from trainer.observe.observer import Callbacks, Observer, Request
from trainer.observe.records import CheckpointRecord, EndRecord, EvaluationRecord, RunInfo, StepRecord

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)*", re.ASCII)  # what every tracking service accepts
_LONGEST_NAME = 200
_OUR_GROUPS = ("train", "eval", "best")  # of names at TensorBoard and at tracking services
_OUR_NAMES = tuple(one.name for one in fields(StepRecord))


class Callback:
    """A base class of callbacks for `trainer.run`. A subclass overrides the moments that it needs.

    An error in a moment ends the run with the name of the class. No moment may communicate with other ranks.
    """

    every_rank: ClassVar[bool] = False
    """Whether every rank calls it; otherwise rank 0 does."""

    def start(self, run: RunInfo) -> None:
        """Follow a run before its first step; `run.resumed_from` is the step of its checkpoint, or None.

        A run that is resumed or restarted calls it again.
        """

    def step(self, record: StepRecord) -> Request | None:
        """Follow a step that is logged (`logging.every`)."""
        return None

    def evaluation(self, record: EvaluationRecord) -> Request | None:
        """Follow an evaluation."""
        return None

    def checkpoint(self, record: CheckpointRecord) -> Request | None:
        """Follow a complete checkpoint, perhaps of an earlier step: the training continues while it is written."""
        return None

    def end(self, record: EndRecord) -> None:
        """Follow the end of the run, also after an error."""


class CallbackObserver(Observer):
    """The observer that calls a callback.

    Args:
        callback: the callback. It gets copies, so that its changes reach neither the training nor other observers.
    """

    def __init__(self, callback: Callback, note: Callable[[str], None]) -> None:
        self._callback = callback
        self._name = f"the callback `{type(callback).__name__}`"
        self._note = note

    def start(self, run: RunInfo) -> None:
        with self._named("start"):
            _nothing(self._callback.start(deepcopy(run)))  # type: ignore[func-returns-value]

    def step(self, record: StepRecord) -> Request | None:
        with self._named("step"):
            return self._checked(self._callback.step(deepcopy(record)))

    def evaluation(self, record: EvaluationRecord) -> Request | None:
        with self._named("evaluation"):
            return self._checked(self._callback.evaluation(deepcopy(record)))

    def checkpoint(self, record: CheckpointRecord) -> Request | None:
        with self._named("checkpoint"):
            return self._checked(self._callback.checkpoint(deepcopy(record)))

    def end(self, record: EndRecord) -> None:
        """Call the callback. A failed run has an error of its own, so an error here is only a note then."""
        try:
            with self._named("end"):
                _nothing(self._callback.end(deepcopy(record)))  # type: ignore[func-returns-value]
        except TrainerError as error:
            if record.outcome != "failed":
                raise
            self._note(str(error))

    @contextmanager
    def _named(self, moment: str) -> Iterator[None]:
        """Convert an error in the block to one that names the callback and its line."""
        try:
            yield
        except KeyboardInterrupt:  # the second Ctrl+C
            raise
        except BaseException as error:
            # The first frame outside of this module is the line of the user.
            own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
            place = f" ({own[0].filename}, line {own[0].lineno})" if own else ""
            reason = traceback.format_exception_only(error)[-1].strip()  # also of an error without a text
            raise TrainerError(
                f"{self._name} failed in `{moment}`: {reason}{place}; correct it, then start the run again"
            ) from error

    def _checked(self, request: Any) -> Request | None:
        if request is None:
            return None
        if not isinstance(request, Request):
            raise TypeError(f"it must return a Request or None, but returns {request!r}")
        if request.stop:
            self._note(f"{self._name} asks to stop")
        numbers = {_name(name): _number(name, value) for name, value in request.log.items()}
        return Request(bool(request.evaluate), bool(request.save), bool(request.stop), numbers)


def _nothing(value: Any) -> None:
    if value is not None:
        raise TypeError(
            f"it must return None, but returns {value!r}; `step`, `evaluation` and `checkpoint` may return a Request"
        )


def _name(name: Any) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        raise ValueError(
            f"the name of a number must consist of at most {_LONGEST_NAME} letters, digits, `_`, `-`, `.` and `/`, but"
            f" is {name!r}"
        )
    if name in _OUR_NAMES or name.split("/")[0] in _OUR_GROUPS:
        raise ValueError(
            f"the name of a number may not be that of a number of the run, or begin with"
            f" {', '.join(f'`{group}/`' for group in _OUR_GROUPS)}, but is {name!r}"
        )
    return name


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, str | bytes):
            raise TypeError("it is a text")
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"`{name}` must be a number, but is {value!r}") from error


@dataclass(frozen=True)
class UserCallbacks(Callbacks):
    """The callbacks that a user passes to a run.

    Raises:
        UsageError: a value is no callback.
    """

    callbacks: Sequence[Callback]

    def __post_init__(self) -> None:
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                hint = ", an instance and not the class" if isinstance(callback, type) else ""
                raise UsageError(f"`callbacks` must hold instances of `trainer.Callback`, but holds {callback!r}{hint}")

    def __bool__(self) -> bool:
        return bool(self.callbacks)

    def __str__(self) -> str:
        return ", ".join(type(callback).__name__ for callback in self.callbacks)

    def observers(self, rank: int, note: Callable[[str], None]) -> Sequence[Observer]:
        return [CallbackObserver(callback, note) for callback in self.callbacks if callback.every_rank or rank == 0]
