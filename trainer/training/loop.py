"""The training loop: epochs and steps, when to log, evaluate, save and stop. No strategy has a name here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from trainer.base.errors import NonFiniteError, TrainerError
from trainer.checkpoint.progress import Progress
from trainer.checkpoint.saving import Saver
from trainer.engine.engine import Engine, StepResult
from trainer.observe.meter import Meter
from trainer.observe.observer import Observer
from trainer.observe.records import BestMetric, EvaluationRecord, StepRecord
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.microbatch import RankBatch
from trainer.parallel.replicas import check_replicas
from trainer.ranks.stopping import SAVE, STOP, StopRequest
from trainer.recipe.schema import Interval, Recipe
from trainer.training.bad_steps import describe, examine
from trainer.training.evaluation import Evaluator

_FAILING = STOP + 1  # what rank 0 writes can no longer be written
Ending = Literal["finished", "patience", "stop_at_step", "signal", "stop_file"]


@dataclass
class Loop:
    """Trains until the last step, or until something says stop.

    `row_ids` gives the rows of the training split in the global batch of a step (from 0), `saver` writes checkpoints
    of the state after the step just done, `keep_best` exports the model that the evaluation just found to be the best,
    `peak_memory` gives the most bytes that this rank has used.
    """

    recipe: Recipe
    engine: Engine
    batches: Iterable[RankBatch]
    evaluator: Evaluator | None
    best_metric: str
    greater_is_better: bool
    mesh: ParallelMesh
    observers: Observer
    meter: Meter
    progress: Progress
    steps_per_epoch: int
    total_steps: int
    row_ids: Callable[[int], Sequence[int]]
    saver: Saver
    keep_best: Callable[[], None]
    peak_memory: Callable[[], int]
    stop: StopRequest
    _failure: TrainerError | None = field(default=None, init=False)

    def run(self) -> Ending:
        """Runs the steps that are left.

        Raises:
            NonFiniteError: the loss or the gradient norm was not finite once too often.
            TrainerError: ranks that must hold the same weights do not, or an observer cannot write.
        """
        try:
            return self._run()
        except NonFiniteError:
            self.saver.finish()  # what was begun before is good
            raise

    def _run(self) -> Ending:
        self._doing("waiting for rows")
        for batch in self.batches:
            self._doing(f"in step {self.progress.step + 1}")
            # Asked before the step and heard after it: no rank waits only to learn that nobody was told to stop.
            asked = self.mesh.begin_agree_max(_FAILING if self._failure else self.stop.asked())
            settle_saving = self.saver.begin_poll()
            result = self.engine.train_step(batch)
            settle_saving()
            if result.is_bad:
                self._bear(result, batch)
            self._count(batch)
            if self._due(self.recipe.training.check_replicas):
                check_replicas(self.engine.held(), self.engine.placements, self.mesh, self.progress.step)
            if self._due(self.recipe.logging.every):
                self._log(result)
            out_of_patience = self._due(self.recipe.evaluation.every) and self._evaluate()
            request = asked()
            if request == _FAILING:
                self.mesh.on_rank_zero(self._settle)
            ending = self._ending(out_of_patience, request)
            if ending or request == SAVE or self._due(self.recipe.checkpoint.every):
                self._doing("saving a checkpoint")
                with self.meter.paused():
                    self.saver.save()
            if ending:
                self.saver.finish()
                self.mesh.on_rank_zero(self._settle)
                self.stop.obeyed(SAVE, STOP)
                return ending
            if request == SAVE:
                self.saver.finish()  # whoever asked sees it by the file that goes
                self.stop.obeyed(SAVE)
            self._doing("waiting for rows")
        return "finished"

    def _bear(self, result: StepResult, batch: RankBatch) -> None:
        """Tells of a step that was not taken; ends the run where there were too many."""
        rows = self.row_ids(self.progress.step)
        record = examine(self.progress.step + 1, result, batch, rows, self.engine, self.mesh)
        self.progress.bad_steps += 1
        self._tell(lambda: self.observers.bad_step(record))
        allowed = self.recipe.training.max_bad_steps
        if self.progress.bad_steps > allowed:
            raise NonFiniteError(
                f"{describe(record)}; the weights are those of the step before. Lower `optimizer.learning_rate`,"
                " lengthen `schedule.warmup`, look at the rows, or skip such steps (`training.max_bad_steps` is"
                f" {allowed})"
            )
        self.observers.note(f"{describe(record)}; skipped, {self.progress.bad_steps} of at most {allowed} bad steps")

    def _tell(self, observers: Callable[[], None]) -> None:
        """Keeps an observer's error until the ranks next agree: rank 0 would leave alone, and others wait for it."""
        try:
            observers()
        except TrainerError as error:
            self._failure = self._failure or error

    def _settle(self) -> None:
        """Raises the error of an observer, if one could not write."""
        if self._failure is not None:
            raise self._failure
        self.observers.flush()

    def _doing(self, what: str) -> None:
        self.observers.doing(self.progress.step, what)

    def _count(self, batch: RankBatch) -> None:
        self.progress.step += 1
        self.progress.samples += batch.num_rows
        self.progress.tokens += batch.num_tokens
        self.meter.add(batch.num_rows, batch.num_tokens)

    def _due(self, every: Interval | None) -> bool:
        """Whether something is due after this step: at each interval, and at the very end."""
        if every is None:
            return False
        steps = every.count * (self.steps_per_epoch if every.unit == "epochs" else 1)
        return self.progress.step % steps == 0 or self.progress.step == self.total_steps

    def _log(self, result: StepResult) -> None:
        rates = self.meter.read()
        record = StepRecord(
            step=self.progress.step,
            epoch=self.progress.step / self.steps_per_epoch,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            samples=self.progress.samples,
            tokens=self.progress.tokens or None,
            step_seconds=rates.step_seconds,
            samples_per_second=rates.samples_per_second,
            tokens_per_second=rates.tokens_per_second,
            peak_memory_bytes=self.mesh.agree_max(self.peak_memory()),
            skipped_steps=result.skipped_steps,
            loss_scale=result.loss_scale,
            mfu=rates.mfu,
        )
        self._tell(lambda: self.observers.step(record))

    def _evaluate(self) -> bool:
        """Evaluates; says whether patience has run out."""
        if self.evaluator is None:
            return False
        self._doing("in an evaluation")
        with self.meter.paused():
            metrics = self.evaluator.evaluate()
            self._tell(lambda: self.observers.evaluation(EvaluationRecord(self.progress.step, metrics)))
            if self._is_best(metrics[self.best_metric]):
                self.progress.best = BestMetric(self.best_metric, metrics[self.best_metric], self.progress.step)
                self.progress.evaluations_since_best = 0
                self._doing("exporting the best model")
                self.keep_best()
            else:
                self.progress.evaluations_since_best += 1
        patience = self.recipe.evaluation.patience
        return patience is not None and self.progress.evaluations_since_best >= patience

    def _is_best(self, value: float) -> bool:
        best = self.progress.best
        if best is None or best.name != self.best_metric:  # a resumed run may ask for another metric
            return True
        return value > best.value if self.greater_is_better else value < best.value

    def _ending(self, out_of_patience: bool, request: int) -> Ending | None:
        if self.progress.step >= self.total_steps:
            return "finished"
        if request > SAVE:
            return "stop_file" if request == STOP else "signal"
        if out_of_patience:
            return "patience"
        return "stop_at_step" if self.progress.step == self.recipe.training.stop_at_step else None
