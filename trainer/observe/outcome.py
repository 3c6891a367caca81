"""Warnings at the end of a run: it has taught the model nothing, or its loss has diverged."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from statistics import median

from trainer.observe.observer import Observer
from trainer.observe.records import BestMetric, EvaluationRecord, RunInfo, StepRecord
from trainer.tasks.metrics.table import merit

_MEDIAN_OF = 5  # logged losses, since those of single batches vary
_DIVERGED = 2.0  # times the first losses, or times the loss of a prediction that ignores the input


class Outcome(Observer):
    """Observer that compares the end of a training with its start and with predictions that ignore the input."""

    def __init__(self) -> None:
        self._run: RunInfo | None = None
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=_MEDIAN_OF)
        self._evaluated: float | None = None

    def start(self, run: RunInfo) -> None:
        self._run = run

    def step(self, record: StepRecord) -> None:
        if len(self._first) < _MEDIAN_OF:
            self._first.append(record.loss)
        self._last.append(record.loss)

    def evaluation(self, record: EvaluationRecord) -> None:
        self._evaluated = record.metrics["loss"]

    def warnings(self, best: BestMetric | None) -> tuple[str, ...]:
        """Return the warnings for the user, the best evaluation given."""
        if self._run is None or not self._last:
            return ()
        return (*self._divergence(self._run), *_no_better_than_chance(self._run.baselines, best))

    def _divergence(self, run: RunInfo) -> Iterator[str]:
        trivial = run.baselines.get("loss")
        few = len(self._first) < _MEDIAN_OF
        first, last = (self._first[0], self._last[-1]) if few else (median(self._first), median(self._last))
        # A loss that has grown but still beats a prediction that ignores the input has not diverged.
        grown = last > _DIVERGED * first > 0 and (trivial is None or last > trivial)
        bad = [loss for loss in (last, self._evaluated) if trivial and loss is not None and loss > _DIVERGED * trivial]
        if grown or bad:
            start = f"the first logged losses are near {first:.4g}, the last ones near {last:.4g}"
            chance = f"; a prediction that ignores the input has {trivial:.4g}" if trivial else ""
            rate = (run.recipe.get("optimizer") or {}).get("learning_rate")
            yield f"the loss diverged: {start}{chance}; lower `optimizer.learning_rate` ({rate}) or warm up longer"


def _no_better_than_chance(baselines: Mapping[str, float], best: BestMetric | None) -> Iterator[str]:
    if best is None or best.name not in baselines:
        return
    chance = baselines[best.name]
    if merit(best.name, {best.name: best.value})[0] <= merit(best.name, {best.name: chance})[0]:
        yield (
            f"{best.name} {best.value:.4f} does not beat {chance:.4f}, which a prediction that ignores the input"
            " reaches; look at the labels, and try another `optimizer.learning_rate` or more steps"
        )
