"""When to log, evaluate, save and stop; the engine is a list of numbers."""

from __future__ import annotations

import itertools
import math
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import RankPools
from tests.helpers.training import tiny_recipe
from trainer.base.errors import NonFiniteError, TrainerError, UsageError
from trainer.checkpoint.counters import Progress
from trainer.engine.results import StepResult
from trainer.observe.meter import Meter
from trainer.observe.observer import Observer, Request
from trainer.observe.records import (
    BadStepRecord,
    BestMetric,
    CheckpointRecord,
    EvaluationRecord,
    LoggedRecord,
    StepRecord,
)
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.microbatch import RankBatch
from trainer.ranks.stopping import StopRequest
from trainer.tasks.metrics.table import METRICS
from trainer.training.best_evaluation import BestEvaluation
from trainer.training.loop import Loop
from trainer.training.whole_split import Evaluated


class Batches(list[RankBatch]):
    """So many global batches of 12 rows."""

    def __init__(self, number: int) -> None:
        super().__init__([RankBatch([], num_rows=12, num_tokens=100)] * number)

    def row_ids(self, step: int) -> range:
        return range(12 * step, 12 * step + 12)


@dataclass
class World(Observer):
    """Engine, evaluator and observer at once; `events` is what happened, in order."""

    metrics: list[float] = field(default_factory=list)  # of each evaluation in turn
    losses: list[float] = field(default_factory=list)  # likewise; none: all are 0.5
    signal_at_step: int | None = None
    bad_steps: tuple[int, ...] = ()
    touch: dict[int, Path] = field(default_factory=dict)  # a file that appears during a step
    stop: StopRequest = field(default_factory=StopRequest)
    events: list[str] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    step_done: int = 0
    progress: Progress = field(default_factory=Progress)
    requests: dict[int, Request] = field(default_factory=dict)  # the answer to the record of a step
    after_evaluation: Request | None = None
    fails_at_step: int | None = None
    saved: list[CheckpointRecord] = field(default_factory=list)
    logged_records: list[LoggedRecord] = field(default_factory=list)
    last: int | None = None
    between: None = None  # no checkpoints in memory
    is_saved: bool = False  # whether the end waited for what was being written

    def begin_step(self, batch: RankBatch, before_update: Callable[[], object]) -> Callable[[], StepResult]:
        self.step_done += 1
        if self.step_done == self.signal_at_step:
            self.stop.received = signal.SIGTERM
        if self.step_done in self.touch:
            self.touch[self.step_done].touch()
        self.events.append(f"step {self.step_done}")
        before_update()
        is_bad = self.step_done in self.bad_steps
        result = StepResult(math.nan if is_bad else 1 / self.step_done, math.nan if is_bad else 2.0, learning_rate=0.1)
        return lambda: result

    def evaluate(self) -> Evaluated:
        self.events.append("evaluate")
        done = len(self.evaluations)
        loss = self.losses[done] if self.losses else 0.5
        return Evaluated({"accuracy": self.metrics[done], "loss": loss}, None)

    def step(self, record: StepRecord) -> Request | None:
        self.events.append("log")
        self.records.append(record)
        if record.step == self.fails_at_step:
            raise TrainerError("the callback `Picky` failed")
        return self.requests.get(record.step)

    def evaluation(self, record: EvaluationRecord) -> Request | None:
        self.evaluations.append(record)
        return self.after_evaluation

    def checkpoint(self, record: CheckpointRecord) -> None:
        self.saved.append(record)

    def logged(self, record: LoggedRecord) -> None:
        self.logged_records.append(record)

    def bad_step(self, record: BadStepRecord) -> None:
        self.events.append("bad")

    def note(self, text: str) -> None:
        self.notes.append(text)

    def save(self) -> None:
        self.events.append("save")

    def begin_poll(self) -> Callable[[], None]:
        return lambda: None

    def finish(self) -> None:
        self.is_saved = True
        self.last = after(self, "save")[-1] if after(self, "save") else None

    def keep_best(self) -> None:
        self.events.append("best")


def loop(
    world: World,
    total_steps: int = 6,
    steps_per_epoch: int = 3,
    progress: Progress | None = None,
    evaluated: bool = True,
    world_size: int = 1,
    has_callbacks: bool = False,
    **recipe: Any,
) -> Loop:
    sections = {"evaluation": {"every": None}, "logging": {"every": "100 steps"}} | recipe
    progress = progress or Progress()
    world.step_done, world.progress = progress.step, progress
    whole = tiny_recipe(**sections)
    return Loop(
        recipe=whole,
        engine=world,
        loader=Batches(total_steps - progress.step),
        validation=BestEvaluation(whole, progress, world if evaluated else None, world.keep_best),
        mesh=ParallelMesh(torch.device("cpu"), dp_replicate=world_size),
        observers=world,
        meter=Meter(),
        steps_per_epoch=steps_per_epoch,
        saver=world,
        stop=world.stop,
        has_callbacks=has_callbacks,
    )


def after(world: World, event: str) -> list[int]:
    """The steps after which something happened."""
    step, found = 0, []
    for happened in world.events:
        if happened.startswith("step "):
            step = int(happened.removeprefix("step "))
        elif happened == event:
            found.append(step)
    return found


class TestIntervals:
    @pytest.mark.parametrize(
        ("every", "steps"),
        [
            ("1 step", [1, 2, 3, 4, 5, 6, 7]),
            ("2 steps", [2, 4, 6, 7]),
            ("7 steps", [7]),
            ("100 steps", [7]),
            ("1 epoch", [3, 6, 7]),
            ("2 epochs", [6, 7]),
        ],
    )
    def test_at_each_interval_and_at_the_end(self, every, steps):
        world = World([0.1] * 7)
        recipe = {"logging": {"every": every}, "evaluation": {"every": every}, "checkpoint": {"every": every}}
        assert loop(world, total_steps=7, **recipe).run() == "finished"
        assert after(world, "log") == after(world, "evaluate") == after(world, "save") == steps

    def test_the_end_is_always_saved(self):
        world = World()
        loop(world).run()
        assert after(world, "save") == [6]
        assert world.is_saved
        assert after(world, "evaluate") == []
        assert after(world, "log") == [6]

    def test_a_step_is_logged_then_evaluated_then_saved(self):
        """A checkpoint holds the evaluation of its step, so that a resumed run does not evaluate again."""
        world = World([0.1])
        every = {"every": "6 steps"}
        loop(world, logging=every, evaluation=every, checkpoint=every).run()
        assert world.events[5:] == ["step 6", "log", "evaluate", "best", "save"]

    def test_without_a_validation_split_nothing_is_evaluated(self):
        world = World()
        loop(world, evaluated=False, evaluation={"every": "1 step"}).run()
        assert after(world, "evaluate") == []


class TestProgress:
    def test_counts_rows_and_tokens(self):
        run = loop(World())
        run.run()
        assert run.progress == Progress(step=6, samples=72, tokens=600)

    def test_goes_on_where_it_was(self):
        world = World([0.1] * 9)
        run = loop(world, progress=Progress(4, 48, 400), evaluation={"every": "2 steps"})
        assert run.run() == "finished"
        assert (run.progress.step, run.progress.samples, run.progress.tokens) == (6, 72, 600)
        assert world.events[0] == "step 5"
        assert after(world, "evaluate") == [6]

    def test_a_run_that_is_done_does_nothing(self):
        world = World()
        assert loop(world, progress=Progress(6, 72, 600)).run() == "already_finished"
        assert world.events == []

    def test_records(self, monkeypatch):
        world = World()
        monkeypatch.setattr("trainer.training.loop.peak_memory_bytes", lambda device: 1000 + world.step_done)
        loop(world, logging={"every": "2 steps"}).run()
        last = world.records[-1]
        assert [record.step for record in world.records] == [2, 4, 6]
        assert (last.loss, last.grad_norm, last.learning_rate) == (1 / 6, 2.0, 0.1)
        assert (last.epoch, last.samples, last.tokens, last.peak_memory_bytes) == (2.0, 72, 600, 1006)
        assert last.samples_per_second / last.tokens_per_second == pytest.approx(0.12)


class TestBadSteps:
    def test_the_first_ends_the_run_and_saves_nothing(self):
        world = World(bad_steps=(3,))
        run = loop(world, checkpoint={"every": "2 steps"})
        with pytest.raises(NonFiniteError, match=r"`training.max_bad_steps` is 0.*step 3: the loss is nan and "):
            run.run()
        assert after(world, "save") == [2]
        assert world.is_saved, "what was begun before is good"
        assert world.events[-2:] == ["step 4", "bad"], "read while the device works, before the next update"

    def test_as_many_as_allowed_are_skipped_and_counted(self):
        world = World(bad_steps=(2, 3))
        run = loop(world, training={"max_bad_steps": 2})
        assert run.run() == "finished"
        assert run.progress == Progress(step=6, samples=72, tokens=600, bad_steps=2)
        assert after(world, "bad") == [3, 4]
        assert "skipped, 2 of at most 2 bad steps" in world.notes[-1]

    def test_is_read_before_a_checkpoint_or_an_evaluation(self):
        world = World([0.5, 0.5], bad_steps=(2, 3, 6))
        sections = {"checkpoint": {"every": "2 steps"}, "evaluation": {"every": "3 steps"}}
        loop(world, training={"max_bad_steps": 3}, **sections).run()
        steps = [event for event in world.events if event in ("bad", "evaluate", "save") or event.startswith("step")]
        assert steps[1:5] == ["step 2", "bad", "save", "step 3"]
        assert steps[5:7] == ["bad", "evaluate"]
        assert [event for event in steps if event != "best"][-3:] == ["bad", "evaluate", "save"]

    def test_a_resumed_run_remembers(self):
        world = World(bad_steps=(5,))
        with pytest.raises(NonFiniteError):
            loop(world, progress=Progress(4, 48, 400, bad_steps=2), training={"max_bad_steps": 2}).run()


class TestBest:
    @pytest.mark.parametrize(
        ("greater_is_better", "best", "value", "kept"), [(True, 4, 0.9, [1, 4]), (False, 6, 0.1, [1, 2, 6])]
    )
    def test_the_first_of_the_best_is_kept(self, monkeypatch, greater_is_better, best, value, kept):
        monkeypatch.setitem(METRICS, "accuracy", replace(METRICS["accuracy"], greater_is_better=greater_is_better))
        world = World([0.5, 0.4, 0.5, 0.9, 0.9, 0.1])
        run = loop(world, evaluation={"every": "1 step"})
        run.run()
        assert run.progress.best == BestMetric("accuracy", value, best, 0.5)
        assert after(world, "best") == kept

    def test_the_lower_loss_decides_between_equal_values(self):
        world = World([0.5, 0.5, 0.5, 0.4, 0.5, 0.5], losses=[0.9, 0.8, 0.8, 0.1, math.nan, 0.7])
        run = loop(world, total_steps=7, evaluation={"every": "1 step", "patience": 5})
        assert run.run() == "patience"  # 5 evaluations without a better value
        assert after(world, "best") == [1, 2, 6]
        assert run.progress.best == BestMetric("accuracy", 0.5, 6, 0.7)

    def test_any_number_is_better_than_nan(self):
        world = World([math.nan, 0.1, math.nan, 0.2, 0.2, 0.2])
        loop(world, evaluation={"every": "1 step"}).run()
        assert after(world, "best") == [1, 2, 4]

    def test_a_resumed_run_remembers(self):
        world = World([0.5, 0.7])
        progress = Progress(4, best=BestMetric("accuracy", 0.6, 2), evaluations_since_best=1)
        run = loop(world, progress=progress, evaluation={"every": "1 step"})
        run.run()
        assert after(world, "best") == [6]
        assert run.progress.evaluations_since_best == 0

    def test_and_forgets_where_it_is_asked_for_another_metric(self):
        """0.6 was an accuracy; a loss of 0.5 is neither better nor worse."""
        world = World([0.1, 0.1])
        progress = Progress(4, best=BestMetric("accuracy", 0.2, 2), evaluations_since_best=3)
        run = loop(world, progress=progress, evaluation={"every": "1 step", "best": "loss"})
        run.run()
        assert run.progress.best == BestMetric("loss", 0.5, 5, 0.5)
        assert run.progress.evaluations_since_best == 1


class TestPatience:
    def test_counts_evaluations_without_improvement(self):
        world = World([0.5, 0.4, 0.6, 0.6, 0.3, 0.9])
        run = loop(world, evaluation={"every": "1 step", "patience": 2})
        assert run.run() == "patience"
        assert run.progress.step == 5
        assert world.events[-1] == "save"

    def test_at_the_last_step_the_run_is_finished(self):
        assert loop(World([0.5] * 6), evaluation={"every": "1 step", "patience": 5}).run() == "finished"

    def test_outlives_a_resumption(self):
        progress = Progress(3, best=BestMetric("accuracy", 0.6, 1), evaluations_since_best=2)
        run = loop(World([0.5]), progress=progress, evaluation={"every": "1 step", "patience": 3})
        assert run.run() == "patience"
        assert run.progress.step == 4

    @pytest.mark.parametrize(
        ("evaluation", "ending"),
        [
            ({"patience": 2}, "already_out_of_patience"),
            ({"patience": 3}, "finished"),
            ({"patience": None}, "finished"),
            ({"patience": 2, "best": "loss"}, "finished"),
        ],
    )
    def test_that_has_run_out_trains_no_more(self, evaluation, ending):
        world = World([0.7, 0.8])
        progress = Progress(4, best=BestMetric("accuracy", 0.6, 2), evaluations_since_best=2)
        assert loop(world, progress=progress, evaluation={"every": "1 step", **evaluation}).run() == ending
        assert bool(world.events) == (ending == "finished")


class TestStop:
    def test_at_a_step(self):
        world = World()
        assert loop(world, training={"stop_at_step": 4}).run() == "stop_at_step"
        assert world.events == ["step 1", "step 2", "step 3", "step 4", "save"]

    def test_the_same_command_goes_on_after_it(self):
        world = World()
        assert loop(world, progress=Progress(4), training={"stop_at_step": 4}).run() == "finished"

    def test_at_the_last_step_the_run_is_finished(self):
        assert loop(World(), training={"stop_at_step": 6}).run() == "finished"
        assert loop(World(signal_at_step=5)).run() == "finished"

    def test_by_a_signal_that_came_before_a_step_after_that_step(self):
        world = World()
        world.stop.received = signal.SIGUSR1
        assert loop(world).run() == "signal"
        assert world.events == ["step 1", "save"]

    def test_by_a_signal_that_came_during_a_step_after_the_next_one(self):
        """Ranks ask each other before a step and hear the answer after it."""
        world = World(signal_at_step=2)
        assert loop(world).run() == "signal"
        assert world.events == ["step 1", "step 2", "step 3", "save"]

    def test_by_a_file_after_the_step_that_follows_it(self, tmp_path):
        world = World(touch={2: tmp_path / "stop"})
        world.stop = StopRequest(clock=itertools.count().__next__)  # looks at every step
        world.stop.watch(tmp_path)
        assert loop(world).run() == "stop_file"
        assert world.events == ["step 1", "step 2", "step 3", "save"]
        assert not (tmp_path / "stop").exists()

    def test_a_file_asks_for_a_checkpoint_and_the_run_goes_on(self, tmp_path):
        world = World(touch={2: tmp_path / "save"})
        world.stop = StopRequest(clock=itertools.count().__next__)
        world.stop.watch(tmp_path)
        assert loop(world).run() == "finished"
        assert after(world, "save") == [3, 6]
        assert not (tmp_path / "save").exists()

    def test_a_file_that_came_too_late_does_not_stop_the_next_run(self, tmp_path):
        world = World(touch={6: tmp_path / "stop"})
        world.stop.watch(tmp_path)
        assert loop(world).run() == "finished"
        assert not (tmp_path / "stop").exists()

    def test_saves_once_where_a_checkpoint_was_due_anyway(self):
        world = World(signal_at_step=1)
        loop(world, checkpoint={"every": "1 step"}).run()
        assert world.events == ["step 1", "save", "step 2", "save"]

    def test_all_ranks_stop_at_the_same_step_whichever_got_the_signal(self, ranks: RankPools):
        expected = ("signal", 4, ["step 1", "step 2", "step 3", "step 4", "save"])
        assert ranks(2).run(run_with_a_signal_on_the_last_rank) == [expected] * 2

    def test_ranks_show_the_memory_of_the_one_that_used_most(self, ranks: RankPools):
        assert ranks(2).run(peak_memory_of_two) == [(5001, (5000, 5001))] * 2

    def test_one_process_shows_the_memory_of_each_of_its_gpus(self):
        world = World()
        with (
            patch("torch.cuda.device_count", lambda: 3),
            patch("torch.cuda.memory.memory_stats", lambda device: {"allocated_bytes.all.peak": 5000 + device.index}),
        ):
            loop(world, parallel={"strategy": "dp"}).run()
        record = world.records[-1]
        assert (record.peak_memory_bytes, record.rank_memory_bytes) == (5002, (5000, 5001, 5002))


class TestRequests:
    def test_an_evaluation_and_a_checkpoint_of_the_same_step(self):
        world = World([0.5, 0.5], requests={2: Request(evaluate=True, save=True)})
        run = loop(world, has_callbacks=True, logging={"every": "1 step"})
        assert run.run() == "finished"
        assert [record.step for record in world.evaluations] == after(world, "save")[:1] == [2]

    def test_an_evaluation_that_was_due_anyway_is_made_once_and_its_answer_can_stop(self):
        world = World([0.5], requests={2: Request(evaluate=True)}, after_evaluation=Request(stop=True))
        every = {"every": "2 steps"}
        assert loop(world, has_callbacks=True, logging=every, evaluation=every).run() == "callback"
        assert after(world, "evaluate") == after(world, "save") == [2]

    def test_numbers_are_passed_on_and_checkpoints_reported_when_complete(self):
        world = World(requests={2: Request(log={"gap": 0.5})})
        loop(world, has_callbacks=True, logging={"every": "2 steps"}, checkpoint={"every": "4 steps"}).run()
        assert world.logged_records == [LoggedRecord(2, {"gap": 0.5})]
        assert [(record.step, record.folder.name) for record in world.saved] == [(6, "step-00000006")]

    def test_an_evaluation_without_rows_is_refused(self):
        world = World(requests={1: Request(evaluate=True)})
        with pytest.raises(UsageError, match=r"`data.validation` is null"):
            loop(world, evaluated=False, has_callbacks=True, logging={"every": "1 step"}).run()

    def test_of_one_rank_are_followed_by_all_ranks(self, ranks: RankPools):
        expected = ("callback", [1], ["step 1", "log", "evaluate", "best", "step 2", "log", "step 3", "log", "save"])
        # A rank that does not evaluate leaves the other one waiting.
        assert ranks(2).run(run_with_requests, timeout_seconds=100.0) == [expected] * 2

    def test_an_error_of_one_rank_ends_all(self, ranks: RankPools):
        # A rank that goes on waits for the other one.
        assert ranks(2).run(run_with_an_error, timeout_seconds=100.0) == ["the callback `Picky` failed"] * 2


def run_with_requests() -> tuple[str, list[int], list[str]]:
    rank = dist.get_rank()
    world = World([0.5] * 6, requests={1: Request(evaluate=True)} if rank == 0 else {3: Request(stop=True)})
    ending = loop(world, world_size=2, has_callbacks=True, logging={"every": "1 step"}).run()
    return ending, after(world, "evaluate"), world.events


def test_no_checkpoint_holds_a_step_whose_report_failed():
    world = World(fails_at_step=2)
    with pytest.raises(TrainerError, match="the callback"):
        loop(world, logging={"every": "1 step"}, checkpoint={"every": "2 steps"}).run()
    assert "save" not in world.events


def run_with_an_error() -> str:
    world = World(fails_at_step=2 if dist.get_rank() == 1 else None)
    with pytest.raises(TrainerError) as error:
        loop(world, world_size=2, has_callbacks=True, logging={"every": "1 step"}).run()
    return str(error.value)


def run_with_a_signal_on_the_last_rank() -> tuple[str, int, list[str]]:
    world = World(signal_at_step=3 if dist.get_rank() == 1 else None)
    run = loop(world, world_size=2)
    return run.run(), run.progress.step, world.events


def peak_memory_of_two() -> tuple[int, tuple[int, ...]]:
    world = World()
    run = loop(world, world_size=2)
    with patch("trainer.training.loop.peak_memory_bytes", lambda device: 5000 + dist.get_rank()):
        run.run()
    record = world.records[-1]
    return record.peak_memory_bytes, record.rank_memory_bytes
