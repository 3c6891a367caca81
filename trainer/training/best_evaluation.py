"""The best evaluation of a run so far, the export of its model, and the patience."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainer.base.errors import UsageError
from trainer.checkpoint.counters import Progress
from trainer.observe.records import BestMetric, EvaluationRecord
from trainer.recipe.schema import Recipe
from trainer.tasks.metrics.table import merit
from trainer.training.whole_split import Evaluator


@dataclass(frozen=True)
class BestEvaluation:
    """Evaluates a run, and keeps the best result. The counters of the run hold it, so a resumed run knows it."""

    recipe: Recipe
    progress: Progress
    evaluator: Evaluator | None  # The evaluator; None: there is nothing to evaluate on
    keep_best: Callable[[], None]  # A function that exports the model after the best evaluation so far
    rows: str | None = None  # The hash of the validation rows; None without them

    @property
    def metric(self) -> str:
        """The name of the metric that decides which evaluation is the best."""
        return self.recipe.evaluation.best or self.recipe.task.selecting[0]

    def notes(self) -> list[str]:
        """Return a note for the user if a resumed run evaluates other rows."""
        best = self.progress.best
        if best is not None and self.rows not in (None, self.progress.best_rows):
            return ["validation data changed; best-metric tracking restarts"]
        return []

    def evaluate(self) -> EvaluationRecord:
        """Evaluate. All ranks must call it.

        Raises:
            UsageError: There is nothing to evaluate on.
        """
        if self.evaluator is None:
            raise UsageError("a callback asks for an evaluation, but `data.validation` is null; name a split")
        return EvaluationRecord(self.progress.step, *self.evaluator.evaluate())

    def is_best(self, record: EvaluationRecord) -> bool:
        """Count an evaluation, and return whether it is the best so far."""
        new, best = merit(self.metric, record.metrics), self._best_merit()
        self.progress.evaluations_since_best += 1
        # Patience counts the metric alone: a better loss at an equal metric is the best model, but no progress.
        if best is None or new[0] > best[0]:
            self.progress.evaluations_since_best = 0
        is_best = best is None or new > best
        if is_best:
            value, loss = record.metrics[self.metric], record.metrics["loss"]
            self.progress.best = BestMetric(self.metric, value, record.step, loss)
            self.progress.best_rows = self.rows
        return is_best

    def is_out_of_patience(self) -> bool:
        """Return whether `evaluation.patience` evaluations in a row were no better."""
        patience = self.recipe.evaluation.patience
        return (
            patience is not None and self._best_merit() is not None and self.progress.evaluations_since_best >= patience
        )

    def _best_merit(self) -> tuple[float, float] | None:
        """Return the merit of the best evaluation; a resumed run may ask for another metric, or evaluate other rows."""
        best = self.progress.best
        # Values of another metric, or over other rows, cannot be compared.
        if best is None or best.name != self.metric or self.progress.best_rows != self.rows:
            return None
        return merit(best.name, {"loss": best.loss, best.name: best.value})
