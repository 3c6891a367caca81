"""The observer of a callback names it in errors and checks its requests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.observe.samples import end_record, run_info, step_record
from trainer.base.errors import TrainerError, UsageError
from trainer.features.callbacks.callbacks import Callback, CallbackObserver, UserCallbacks
from trainer.observe.observer import Observer, Observers, Request
from trainer.observe.records import EvaluationRecord


@dataclass
class Answer(Callback):
    """Answers a step with a value, and fails where it has none."""

    answers: list[Any] = field(default_factory=list)

    def step(self, record):
        return self.answers[record.step - 1]

    def end(self, record):
        raise OSError("no such channel")


class Notes(Observer):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def ask(answer: Any, notes: Notes | None = None) -> Request | None:
    return CallbackObserver(Answer([answer]), (notes or Notes()).note).step(step_record(1))


def test_an_error_names_the_callback_its_moment_and_line():
    with pytest.raises(
        TrainerError, match=r"`Answer` failed in `step`: IndexError: .*test_callbacks.py, line [0-9]+\)"
    ):
        CallbackObserver(Answer(), print).step(step_record(1))


class NoTextError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@dataclass
class Raising(Callback):
    error: BaseException

    def evaluation(self, record):
        raise self.error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (SystemExit(0), "SystemExit: 0"),
        (asyncio.CancelledError(), "CancelledError"),
        (GeneratorExit(), "GeneratorExit"),
        (NoTextError(), "NoTextError: <exception str"),
    ],
)
def test_an_end_of_any_kind_is_an_error_of_the_callback(error, reason):
    with pytest.raises(TrainerError, match=f"`Raising` failed in `evaluation`: .*{reason}"):
        CallbackObserver(Raising(error), print).evaluation(EvaluationRecord(1, {"loss": 1.0}))
    with pytest.raises(KeyboardInterrupt):
        CallbackObserver(Raising(KeyboardInterrupt()), print).evaluation(EvaluationRecord(1, {"loss": 1.0}))


class Changing(Callback):
    def start(self, run):
        run.recipe["training"] = None

    def evaluation(self, record):
        record.metrics.clear()
        return Request(stop=np.array([0, 1]))  # type: ignore[arg-type]


def test_a_change_of_a_record_stays_with_the_callback_and_an_answer_without_a_truth_value_is_an_error(tmp_path):
    observer, record, info = CallbackObserver(Changing(), print), EvaluationRecord(1, {"loss": 1.0}), run_info(tmp_path)
    before = dict(info.recipe)
    observer.start(info)
    with pytest.raises(TrainerError, match=r"`Changing` failed in `evaluation`: ValueError"):
        observer.evaluation(record)
    assert record.metrics == {"loss": 1.0}
    assert info.recipe == before


def test_an_error_at_the_end_of_a_failed_run_does_not_hide_the_first(tmp_path):
    notes = Notes()
    observer = CallbackObserver(Answer(), notes.note)
    with pytest.raises(TrainerError, match=r"`Answer` failed in `end`: OSError: no such channel"):
        observer.end(end_record(tmp_path))
    observer.end(end_record(tmp_path, outcome="failed"))
    assert len(notes.notes) == 1


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (True, "must return a Request or None, but returns True"),
        (Request(log={"loss": 1.0}), "may not be that of a number of the run.*'loss'"),
        (Request(log={"eval/mine": 1.0}), "or begin with `train/`, `eval/`, `best/`"),
        (Request(log={"a b": 1.0}), "must consist of"),
        (Request(log={"../a": 1.0}), "must consist of"),
        (Request(log={"a" * 201: 1.0}), "must consist of"),
        (Request(log={"gap": "3"}), "`gap` must be a number, but is '3'"),
        (Request(log={"gap": None}), "`gap` must be a number"),
    ],
)
def test_answers_that_are_refused(answer, problem):
    with pytest.raises(TrainerError, match=problem):
        ask(answer)


def test_numbers_become_floats_and_a_stop_is_noted():
    notes = Notes()
    request = ask(Request(stop=True, log={"mine/gap.1": np.float32(0.5)}), notes)
    assert request == Request(stop=True, log={"mine/gap.1": 0.5})
    assert type(request.log["mine/gap.1"]) is float
    assert notes.notes == ["the callback `Answer` asks to stop"]


def test_requests_of_several_callbacks_are_joined():
    one, two = Answer([Request(evaluate=True, log={"a": 1.0})]), Answer([Request(save=True, log={"b": 2.0})])
    observers = Observers([CallbackObserver(one, print), Observer(), CallbackObserver(two, print)])
    assert observers.step(step_record(1)) == Request(evaluate=True, save=True, log={"a": 1.0, "b": 2.0})
    with pytest.raises(UsageError, match="two log the same of a"):
        Observers([CallbackObserver(one, print)] * 2).step(step_record(1))


def test_a_moment_that_cannot_ask_must_return_none(tmp_path):
    class Early(Callback):
        def start(self, run):
            return Request(evaluate=True)

    with pytest.raises(TrainerError, match=r"`Early` failed in `start`.*must return None"):
        CallbackObserver(Early(), print).start(run_info(tmp_path))


def test_values_that_are_no_callbacks_are_refused():
    UserCallbacks([Answer()])
    with pytest.raises(UsageError, match=r"instances of `trainer.Callback`, but holds 3"):
        UserCallbacks([3])
    with pytest.raises(UsageError, match="an instance and not the class"):
        UserCallbacks([Answer])
