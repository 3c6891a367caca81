import pytest

from tests.observe.samples import end_record, run_info, step_record
from trainer.base.errors import UsageError
from trainer.observe import observer
from trainer.observe.observer import NO_CALLBACKS, Observer, Observers, callbacks_of
from trainer.observe.records import EvaluationRecord, SummaryRow


class Recorder(Observer):
    """Writes down what it is told; raises at `fails_at`."""

    def __init__(self, fails_at: str = "") -> None:
        self.told, self.fails_at = [], fails_at

    def _tell(self, *what):
        self.told.append(what)
        if what[0] == self.fails_at:
            raise OSError("disk full")

    def start(self, run):
        self._tell("start", run)

    def step(self, record):
        self._tell("step", record)

    def evaluation_progress(self, done, total):
        self._tell("evaluation_progress", done, total)

    def evaluation(self, record):
        self._tell("evaluation", record)

    def note(self, text):
        self._tell("note", text)

    def end(self, record):
        self._tell("end", record)

    def close(self):
        self._tell("close")


def test_every_observer_receives_all_events_in_order(tmp_path):
    run, step, evaluation, end = run_info(tmp_path), step_record(1), EvaluationRecord(1, {}), end_record(tmp_path)
    first, second = Recorder(), Recorder()
    observers = Observers([first, second])
    observers.note("hello")
    observers.start(run)
    observers.step(step)
    observers.evaluation_progress(1, 2)
    observers.evaluation(evaluation)
    observers.end(end)
    observers.close()
    assert first.told == second.told
    assert first.told == [
        ("note", "hello"), ("start", run), ("step", step), ("evaluation_progress", 1, 2), ("evaluation", evaluation),
        ("end", end), ("close",),
    ]  # fmt: skip


def test_an_observer_need_not_care(tmp_path):
    observers = Observers([Observer()])
    observers.start(run_info(tmp_path))
    observers.step(step_record(1))
    observers.end(end_record(tmp_path))
    observers.close()


@pytest.mark.parametrize("moment", ["end", "close"])
@pytest.mark.parametrize("failing", [0, 1])
def test_the_end_reaches_all_where_one_fails(tmp_path, moment, failing):
    recorders = [Recorder(), Recorder()]
    recorders[failing].fails_at = moment
    observers = Observers(recorders)
    with pytest.raises(OSError, match="disk full"):
        observers.end(end_record(tmp_path)) if moment == "end" else observers.close()
    assert [recorder.told[0][0] for recorder in recorders] == [moment, moment]


class Rows(Observer):
    def finish(self, step):
        return [SummaryRow("profile", f"{step} steps")]


def test_the_rows_of_the_summary_are_those_of_all_observers():
    assert Observers([Rows(), Observers([Observer(), Rows()])]).finish(7) == [SummaryRow("profile", "7 steps")] * 2


def test_callbacks_without_their_folder_are_refused(monkeypatch):
    monkeypatch.setattr(observer, "sole", lambda kind: None)
    assert callbacks_of([]) is NO_CALLBACKS
    assert (bool(NO_CALLBACKS), str(NO_CALLBACKS), NO_CALLBACKS.observers(0, print)) == (False, "empty", ())
    with pytest.raises(UsageError, match="lacks the folder of callbacks"):
        callbacks_of([object()])
