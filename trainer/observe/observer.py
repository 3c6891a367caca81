"""The seam between the training loop and everything that watches it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from trainer.base.errors import UsageError
from trainer.observe.records import BadStepRecord, EndRecord, EvaluationRecord, RunInfo, StepRecord


class Observer:
    """Something that watches a run. A subclass overrides the moments that it cares about; the others do nothing.

    The order is `start`, then steps and evaluations, then `end`, then `close`. A `note` may come at any time; where the
    run fails before it is built, `end` comes without `start`. None may communicate: of all but `doing`,
    `evaluation_progress`, `end` and `close`, only rank 0 tells its observers. One that writes raises a `TrainerError`
    where it can no longer do so.
    """

    def start(self, run: RunInfo) -> None:
        """The run is built, and its first step follows."""

    def doing(self, step: int, what: str) -> None:
        """This rank has done `step` steps and now begins something; on every rank, several times in each step."""

    def step(self, record: StepRecord) -> None:
        """A logging interval has passed."""

    def bad_step(self, record: BadStepRecord) -> None:
        """A step was not taken; a note says so too."""

    def evaluation_progress(self, done: int, total: int) -> None:
        """`done` of `total` batches of an evaluation are through."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """An evaluation is through."""

    def note(self, text: str) -> None:
        """Something that the user should read: one sentence, no line break."""

    def flush(self) -> None:
        """Writes what is held back, since the last step is done; what cannot be written raises here at the latest."""

    def end(self, record: EndRecord) -> None:
        """The run is over, good or bad."""

    def close(self) -> None:
        """Releases files and the terminal; may be called twice, and without `end`."""


class Observers(Observer):
    """Tells every observer in turn; with none, as on every rank but 0, does nothing."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._observers = tuple(observers)

    def start(self, run: RunInfo) -> None:
        for observer in self._observers:
            observer.start(run)

    def doing(self, step: int, what: str) -> None:
        for observer in self._observers:
            observer.doing(step, what)

    def step(self, record: StepRecord) -> None:
        for observer in self._observers:
            observer.step(record)

    def bad_step(self, record: BadStepRecord) -> None:
        for observer in self._observers:
            observer.bad_step(record)

    def evaluation_progress(self, done: int, total: int) -> None:
        for observer in self._observers:
            observer.evaluation_progress(done, total)

    def evaluation(self, record: EvaluationRecord) -> None:
        for observer in self._observers:
            observer.evaluation(record)

    def note(self, text: str) -> None:
        for observer in self._observers:
            observer.note(text)

    def flush(self) -> None:
        for observer in self._observers:
            observer.flush()

    def end(self, record: EndRecord) -> None:
        """Tells all, even where one raises: the user must learn how the run ended."""
        with ExitStack() as stack:
            for observer in self._observers:
                stack.callback(observer.end, record)

    def close(self) -> None:
        """Closes all, even where one raises."""
        with ExitStack() as stack:
            for observer in self._observers:
                stack.callback(observer.close)


@contextmanager
def packages_of(destination: str) -> Iterator[None]:
    """Inside, what a word of `logging.to` needs is imported; the extra that brings it has the same name.

    Raises:
        UsageError: it is not installed.
    """
    try:
        yield
    except ImportError as error:
        raise UsageError(
            f'`logging.to` holds "{destination}", which needs packages that are not installed;'
            f' install them (pip install "trainer[{destination}]") or take it out of `logging.to` ({error})'
        ) from error
