"""The training loop: when to log, evaluate, save and stop. It does not depend on the strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from trainer.base.errors import NonFiniteError, TrainerError
from trainer.checkpoint.saving import Saver
from trainer.checkpoint.store import CheckpointStore
from trainer.data.loader import TrainLoader
from trainer.engine.engine import Engine
from trainer.engine.results import StepResult
from trainer.observe.meter import Meter, Rates, of_slowest_reader, peak_memory_bytes
from trainer.observe.observer import Observer, Request, joined
from trainer.observe.records import (
    CHECKPOINT,
    DEVICE,
    EVALUATION,
    OUTPUT,
    ROWS,
    STEP,
    CheckpointRecord,
    LoggedRecord,
    StepRecord,
)
from trainer.parallel.copying import is_busy
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.microbatch import RankBatch, positions
from trainer.ranks.stopping import SAVE, STOP, StopRequest
from trainer.recipe.schema import Interval, Recipe
from trainer.recipe.strategies import STRATEGIES
from trainer.training.best_evaluation import BestEvaluation
from trainer.training.rank_numbers import RankNumbers
from trainer.training.run_tool import Elapsed, RunTools

_MOST_SHOWN = 64  # ranks with their memory in a record; a line of more would be long
_FAILING = STOP + 1  # an observer can no longer write
Ending = Literal[
    "finished",
    "already_finished",
    "patience",
    "already_out_of_patience",
    "stop_at_step",
    "signal",
    "stop_file",
    "callback",
]


@dataclass(frozen=True)
class _BegunStep:
    number: int  # from 1
    batch: RankBatch
    read: Callable[[], StepResult]


@dataclass
class Loop:
    """Train until the last step, or until a signal, a file, a callback or the patience stops the run."""

    recipe: Recipe
    engine: Engine
    loader: TrainLoader  # The batches that are left; they begin at `saver.progress`
    validation: BestEvaluation
    mesh: ParallelMesh
    observers: Observer
    meter: Meter
    saver: Saver  # The saver of checkpoints, which holds the progress of the run
    steps_per_epoch: int
    stop: StopRequest
    tools: RunTools = field(default_factory=RunTools)
    has_callbacks: bool = False  # Whether `observers` holds callbacks on any rank
    rows_per_epoch: int | None = None  # If steps differ in their rows, so that these count epochs; None: the steps do
    _failure: TrainerError | None = field(default=None, init=False)
    _begun: _BegunStep | None = field(default=None, init=False)
    _last_good: RankBatch | None = field(default=None, init=False)
    _result: StepResult | None = field(default=None, init=False)
    _hidden: int = field(default=0, init=False)
    _places: int = field(default=0, init=False)
    _compiled: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.progress = self.saver.progress
        self._first = self.progress.step
        self.total_steps = self.progress.step + len(self.loader)
        self._answers: list[Request] = []  # of callbacks to events since the ranks last agreed
        self._reported = self.saver.last  # the step of the checkpoint that observers know

    def notes(self) -> list[str]:
        """Return notes for the user on the steps and evaluations that follow those of a checkpoint."""
        stop, progress = self.recipe.training.stop_at_step, self.progress
        notes = []
        if stop is not None and progress.step >= stop:
            notes.append(
                f"`training.stop_at_step` is {stop}, which has passed; training continues from step {progress.step} to"
                " the last step"
            )
        return [*notes, *self.validation.notes()]

    def run(self) -> Ending:
        """Run the steps that are left.

        Raises:
            NonFiniteError: More steps than allowed were not finite.
            TrainerError: Replicas differ, or an observer cannot write.
        """
        self.meter.begin()
        try:
            return self._run()
        except NonFiniteError:
            self.saver.finish()  # the checkpoint that was begun before is good
            raise

    def _run(self) -> Ending:
        # A resumed run may be out of patience already; nothing is trained then.
        if self.progress.step < self.total_steps and self.validation.is_out_of_patience():
            return "already_out_of_patience"
        self._wait_for_rows()
        for batch in self.loader:
            asked = self._begin_step(batch)
            if self._due(self.recipe.training.check_replicas):
                from trainer.parallel.shards.replicas import check_replicas

                check_replicas(self.engine.held(), self.engine.placements, self.mesh, self.progress.step)
            if self._due(self.recipe.logging.every):
                self._log()
            wanted = self._agreed()
            is_due = self.validation.evaluator is not None and self._due(self.recipe.evaluation.every)
            # The condition is the same on all ranks, which an evaluation needs: it has collectives.
            out_of_patience = (is_due or wanted.evaluate) and self._evaluate()
            wanted = joined([wanted, self._agreed()]) or wanted  # those of the evaluation too
            # Begun with the step, so the answer has travelled while the device computed.
            request = asked()
            # All ranks get the largest request, so they obey the same one after the same step.
            if request == _FAILING:
                self.mesh.on_every_rank(self._flush)
            ending = self._ending(out_of_patience, request, wanted.stop)
            # Every ending saves, so that the same command continues from here or finds nothing to do.
            self._save(bool(ending) or request == SAVE or wanted.save)
            if ending:
                self._end()
                return ending
            if request == SAVE:
                self.saver.finish()  # the file `save` goes when the checkpoint is complete
                self.stop.obeyed(SAVE)
            self._wait_for_rows()
        return "already_finished"

    def _begin_step(self, batch: RankBatch) -> Callable[[], int]:
        """Begin a step, and return a function that waits for the largest request of all ranks."""
        # While the device still works, waiting for rows costs nothing.
        self.meter.enter(STEP, before=DEVICE if is_busy(self.mesh.device) else ROWS)
        self._doing(f"in step {self.progress.step + 1}")
        # Asked before the step and answered after it, so that no rank waits for the answer alone.
        asked = self.mesh.begin_agree_max(_FAILING if self._failure else self.stop.asked())
        settle_saving = self.saver.begin_poll()
        # The numbers of the step before are read before the next update, while the device works. `_begun` is still that
        # step until this call returns; a log, an evaluation or a checkpoint reads the new step at once.
        with self.tools.around_step():
            read = self.engine.begin_step(batch, self._read_begun)
        settle_saving()
        self._report_checkpoint()
        self._count(batch)
        self._begun = _BegunStep(self.progress.step, batch, read)
        self.tools.after_step(self)
        return asked

    def _save(self, is_asked: bool) -> None:
        """Save a checkpoint if it is asked for or due; or one in memory, if that is due."""
        if is_asked or self._due(self.recipe.checkpoint.every):
            self._read_begun()  # a checkpoint holds the number of bad steps
            self.mesh.on_every_rank(self._flush)
            self._doing("saving a checkpoint")
            with self.meter.during(CHECKPOINT):
                self.saver.save()
            self._report_checkpoint()
        # A checkpoint on disk serves also as one in memory that is due after the same step.
        elif self._due(self.saver.between):
            self._read_begun()
            self.mesh.on_every_rank(self._require_reports)
            self._doing("saving a checkpoint in memory")
            with self.meter.during(CHECKPOINT):
                self.saver.save_in_memory()

    def _end(self) -> None:
        with self.meter.during(CHECKPOINT):
            self.saver.finish()
        self._report_checkpoint()
        self.mesh.on_every_rank(self._flush)
        self.stop.obeyed(SAVE, STOP)

    def result(self) -> StepResult:
        """Wait for the numbers of the last step that was begun, and return them.

        Raises:
            NonFiniteError: More steps than allowed were not finite.
        """
        self._read_begun()
        assert self._result is not None, "a step was begun"
        return self._result

    def _read_begun(self) -> None:
        """Read the numbers of the last step, unless they were read before, and report it if it is bad."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        with self.meter.during(DEVICE):
            result = self._result = begun.read()
        if result.is_bad:
            self._skip_bad_step(result, begun)
        else:
            # Its loss was finite, so it can tell later whether the weights or the rows are to blame.
            self._last_good = begun.batch

    def _skip_bad_step(self, result: StepResult, begun: _BegunStep) -> None:
        """Report a step that was not taken, and end the run after too many of them."""
        from trainer.training.bad_steps import describe, examine, remedy

        # Steps of the loader count from 0.
        rows = self.loader.row_ids(begun.number - 1)
        # On all ranks, since the numbers of a step are equal on all of them.
        record = examine(begun.number, result, begun.batch, rows, self.engine, self.mesh, self._last_good)
        self.progress.bad_steps += 1
        self.report(lambda: self.observers.bad_step(record))
        allowed = self.recipe.training.max_bad_steps
        if self.progress.bad_steps > allowed:
            rate = f"(the learning rate is {result.learning_rate:.3g})"
            raise NonFiniteError(
                f"training must continue with finite numbers: {remedy(record)} {rate}; or skip such steps"
                f" (`training.max_bad_steps` is {allowed}). {describe(record)}; the weights are those of the previous"
                " step"
            )
        self.observers.note(f"{describe(record)}; skipped, {self.progress.bad_steps} of at most {allowed} bad steps")

    def report(self, event: Callable[[], Request | None]) -> None:
        """Report an event to the observers, and log the numbers of their answers.

        Requests and errors are kept until the ranks next agree, so that all obey or exit together.
        """
        answer = None
        try:
            answer = event()
            if answer is not None and answer.log:
                self.observers.logged(LoggedRecord(self.progress.step, answer.log))
        except TrainerError as error:
            # The first error, because later ones may follow from it.
            self._failure = self._failure or error
        # Also without an answer, or this rank would not join the others when they agree.
        self._answers.append(replace(answer, log={}) if answer else Request())

    def _agreed(self) -> Request:
        """Return the requests of all ranks since the last call, without numbers. All ranks must call it."""
        answers, self._answers = self._answers, []
        if not (answers and self.has_callbacks):  # the same on all ranks, because they report the same events
            return Request()
        request = joined(answers) or Request()
        evaluate, save, stop = self.mesh.agree_any(request.evaluate, request.save, request.stop)
        return Request(evaluate, save, stop)

    def _report_checkpoint(self) -> None:
        """Report the newest checkpoint if it has become complete since the last call."""
        step = self.saver.last
        if step is not None and step != self._reported:
            self._reported = step
            store = CheckpointStore(Path(self.recipe.checkpoint.folder), self.recipe.checkpoint.keep)
            record = CheckpointRecord(step, store.path(step))
            self.report(lambda: self.observers.checkpoint(record))

    def _require_reports(self) -> None:
        """Refuse to go on after a failed report: a run that resumes behind it would never make it again."""
        if self._failure is not None:
            raise self._failure

    def _flush(self) -> None:
        self._require_reports()
        self.observers.flush()

    def _wait_for_rows(self) -> None:
        self._doing("waiting for rows")
        self.meter.enter(ROWS)

    def _doing(self, what: str) -> None:
        self.observers.doing(self.progress.step, what)

    def _count(self, batch: RankBatch) -> None:
        # Counted when it is begun: a step that proves bad changes no weight, but passes its rows.
        self.progress.step += 1
        self.progress.samples += batch.num_rows
        self.progress.tokens += batch.num_tokens
        self.progress.place = batch.place
        self.meter.add(batch.num_rows, batch.num_tokens)
        if not self.recipe.data.padding_free:
            hidden, places = positions(batch.microbatches)
            self._hidden, self._places = self._hidden + hidden, self._places + places

    def _due(self, every: Interval | None) -> bool:
        if every is None:
            return False
        done, period = self.progress.step, every.count
        if every.unit == "epochs":
            period *= self.rows_per_epoch or self.steps_per_epoch
            done = self.progress.samples if self.rows_per_epoch else done
        # The last step is always due, whatever the interval.
        return done % period == 0 or self.progress.step == self.total_steps

    def _log(self) -> None:
        result = self.result()
        if self.recipe.compile:
            from trainer.models.compiled import compilations

            # `compilations` counts from the start of the process.
            before, (*_, self._compiled) = self._compiled, compilations()
            self.meter.compiled(self._compiled - before)
        rates = self.meter.read()
        # A collective: every rank logs, although only rank 0 writes.
        ranks = self._numbers(rates)
        memory = tuple(rank.memory_bytes for rank in ranks)
        places = sum(rank.positions for rank in ranks)
        step = self.progress.step
        elapsed = Elapsed(step - self._first, ranks[0].trained_seconds, self.total_steps - step)
        self._hidden = self._places = 0
        record = StepRecord(
            step=self.progress.step,
            epoch=self.progress.samples / rows if (rows := self.rows_per_epoch) else step / self.steps_per_epoch,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            samples=self.progress.samples,
            tokens=self.progress.tokens or None,
            step_seconds=rates.step_seconds,
            samples_per_second=rates.samples_per_second,
            tokens_per_second=rates.tokens_per_second,
            peak_memory_bytes=max(memory),
            rank_memory_bytes=memory if len(memory) <= _MOST_SHOWN else (),
            padding=sum(rank.hidden for rank in ranks) / places if places else None,
            seconds=of_slowest_reader(rates.seconds, [rank.waited_seconds for rank in ranks]),
            skipped_steps=result.skipped_steps,
            loss_scale=result.loss_scale,
            mfu=rates.mfu,
            more=result.more(),
        )
        record = self.tools.completed(record, [rank.of_tools for rank in ranks], elapsed)
        with self.meter.during(OUTPUT):
            self.report(lambda: self.observers.step(record))
            for note in self.tools.news():
                self.observers.note(note)

    def _numbers(self, rates: Rates) -> list[RankNumbers]:
        """Return the numbers of every rank; of one process with several GPUs, those of every GPU."""
        peak, waited, trained = peak_memory_bytes(self.mesh.device), rates.seconds.get(ROWS, 0.0), self.meter.trained
        numbers = RankNumbers(peak, waited, self._hidden, self._places, trained, self.tools.seconds())
        if STRATEGIES[self.recipe.parallel.strategy].single_process:
            gpus = [torch.device("cuda", gpu) for gpu in range(torch.cuda.device_count())]
            return [replace(numbers, memory_bytes=peak_memory_bytes(gpu)) for gpu in gpus]
        return numbers.of_every_rank(self.mesh)

    def _evaluate(self) -> bool:
        """Evaluate, and return whether patience has run out."""
        self._read_begun()
        self._doing("in an evaluation")
        with self.meter.during(EVALUATION):
            record = self.validation.evaluate()
            self.report(lambda: self.observers.evaluation(record))
            if self.validation.is_best(record):
                self._doing("exporting the best model")
                self.validation.keep_best()
        return self.validation.is_out_of_patience()

    def _ending(self, out_of_patience: bool, request: int, is_asked: bool) -> Ending | None:
        # The first reason that holds names the ending; after the last step, nothing that was asked matters.
        if self.progress.step >= self.total_steps:
            return "finished"
        if request > SAVE:
            return "stop_file" if request == STOP else "signal"
        if out_of_patience:
            return "patience"
        if is_asked:
            return "callback"
        return "stop_at_step" if self.progress.step == self.recipe.training.stop_at_step else None
