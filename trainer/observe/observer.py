"""The interface between the training loop and its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from trainer.base.errors import UsageError
from trainer.base.extensions import sole
from trainer.observe.records import (
    BadStepRecord,
    CheckpointRecord,
    EndRecord,
    EvaluationRecord,
    LoggedRecord,
    RunInfo,
    StepRecord,
    SummaryRow,
)


@dataclass(frozen=True)
class Request:
    """A request of a callback to its run, which all ranks obey after the same step.

    Args:
        evaluate: Evaluate; `evaluation.best` and `evaluation.patience` count it as any other evaluation.
        save: Save a checkpoint.
        stop: Save a checkpoint and stop; the same command resumes the run.
        log: Numbers by name for all outputs of the run; those of rank 0 count.
    """

    evaluate: bool = False
    save: bool = False
    stop: bool = False
    log: Mapping[str, float] = field(default_factory=dict)


def joined(requests: Iterable[Request | None]) -> Request | None:
    """Return one request for all of them; None if there is none.

    Raises:
        UsageError: two of them log the same name.
    """
    asked = [request for request in requests if request is not None]
    if not asked:
        return None
    numbers = {name: number for request in asked for name, number in request.log.items()}
    if len(numbers) < sum(len(request.log) for request in asked):
        raise UsageError(
            f"callbacks must log different names, but two log the same of {', '.join(numbers)}; rename one"
        )
    return Request(
        any(request.evaluate for request in asked),
        any(request.save for request in asked),
        any(request.stop for request in asked),
        numbers,
    )


class Observer:
    """An output of a run. A subclass overrides the events that it needs.

    The order is `start`, steps and evaluations, `finish`, `end`, `close`; a `note` may come at any time. If the run
    fails before its first step, `start` is left out. Every rank reports events at the same moments to the observers
    that it has, and most are on rank 0 alone, so no method may communicate. A method that cannot write raises
    `TrainerError`.
    """

    def preparing(self, what: str, done: int = 0, total: int | None = None) -> None:
        """Report an activity before `start`, and how many of its parts are done; None: their number is unknown."""

    def start(self, run: RunInfo) -> None:
        """Report that the run is built; its first step follows."""

    def doing(self, step: int, what: str) -> None:
        """Report that this rank begins an activity after `step` steps; several times in each step, on every rank."""

    def step(self, record: StepRecord) -> Request | None:
        """Report the end of a logging interval."""
        return None

    def bad_step(self, record: BadStepRecord) -> None:
        """Report a step that was not taken, beside a note."""

    def evaluation_progress(self, done: int, total: int) -> None:
        """Report that `done` of `total` batches of an evaluation are complete."""

    def evaluation(self, record: EvaluationRecord) -> Request | None:
        """Report a complete evaluation."""
        return None

    def checkpoint(self, record: CheckpointRecord) -> Request | None:
        """Report a complete checkpoint, perhaps of an earlier step."""
        return None

    def logged(self, record: LoggedRecord) -> None:
        """Report numbers that callbacks have logged."""

    def note(self, text: str) -> None:
        """Report a message to the user: one sentence without a line break."""

    def flush(self) -> None:
        """Store all output before a checkpoint and after the last step, and raise its errors."""

    def finish(self, step: int) -> Sequence[SummaryRow]:
        """Complete the output after the last step, `step`, also after an error; return rows of the summary."""
        return ()

    def end(self, record: EndRecord) -> None:
        """Report the end of the run and its outcome."""

    def close(self) -> None:
        """Release files and the terminal; may be called twice, and without `end`."""


class Observers(Observer):
    """All observers of this rank, called in turn at each event; the requests of an event are joined."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._observers = tuple(observers)

    def finish(self, step: int) -> Sequence[SummaryRow]:
        return [row for observer in self._observers for row in observer.finish(step)]

    def end(self, record: EndRecord) -> None:
        """Call all observers, even if one raises: the user must see the outcome."""
        with ExitStack() as stack:
            for observer in self._observers:
                # The stack calls them from the last to the first, and goes on after an error.
                stack.callback(observer.end, record)

    def close(self) -> None:
        """Close all observers, even if one raises."""
        with ExitStack() as stack:
            for observer in self._observers:
                stack.callback(observer.close)


def _in_turn(event: str) -> Callable[..., Request | None]:
    def call(self: Observers, *arguments: Any, **options: Any) -> Request | None:
        return joined([getattr(observer, event)(*arguments, **options) for observer in self._observers])

    return call


# Each event without a method of its own is passed on in turn.
for _event in vars(Observer):
    if not _event.startswith("_") and _event not in vars(Observers):
        setattr(Observers, _event, _in_turn(_event))


class Callbacks:
    """The callbacks of a run, the same on every rank; those of this class are none."""

    def __bool__(self) -> bool:
        """Return whether there are callbacks on any rank, so that the ranks must agree on requests."""
        return False

    def __str__(self) -> str:
        return "empty"

    def observers(self, rank: int, note: Callable[[str], None]) -> Sequence[Observer]:
        """Return the observers of a rank that call them; `note` shows a note to the user."""
        return ()


NO_CALLBACKS = Callbacks()


def callbacks_of(objects: Sequence[Any]) -> Callbacks:
    """Return the callbacks of the objects that `trainer.run` gets.

    Raises:
        UsageError: No folder registers callbacks, or an object is no callback.
    """
    if not objects:
        return NO_CALLBACKS
    kind: Callable[[Sequence[Any]], Callbacks] | None = sole("callbacks")
    if kind is None:
        raise UsageError(
            "`callbacks` must be empty, because this installation lacks the folder of callbacks; remove them"
        )
    return kind(objects)


class NumberObserver(Observer):
    """An observer of numbers by name; those of steps begin with `train/`, those of evaluations with `eval/`."""

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Report the known numbers of a step, of an evaluation or of callbacks."""

    def step(self, record: StepRecord) -> None:
        values = record.numbers()
        self._pass("train/", values.pop("step"), values)

    def evaluation(self, record: EvaluationRecord) -> None:
        self._pass("eval/", record.step, record.metrics)

    def logged(self, record: LoggedRecord) -> None:
        self._pass("", record.step, record.numbers)

    def _pass(self, prefix: str, step: int, values: Mapping[str, float | None]) -> None:
        self.numbers(step, {f"{prefix}{name}": value for name, value in values.items() if value is not None})
