"""The result of a search as plain values, for `search.json`, the page and the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from optuna.trial import FrozenTrial, TrialState
from scipy.stats import t

from trainer.observe.metrics_file import encode_number
from trainer.tools.search.study import REASON, SECONDS, STEP, WORDS, Study

_STATES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "given up",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "not ended",
}
_CONFIDENCE = 0.95


def result_of(ranked: Sequence[tuple[FrozenTrial, Sequence[float]]], study: Study, metric: str) -> dict[str, Any]:
    """Return the trials of a search, the best one, the importance of the keys, and the score of a third split.

    Args:
        ranked: the complete trials, the best first, with the value of each seed.
    """
    complete = [
        {**_values(trial), "value": trial.value, "seeds": list(values), "mean": fmean(values), "half": _half(values)}
        for trial, values in ranked
    ]
    others = [_values(one) for one in study.trials if one.state != TrialState.COMPLETE]
    return {
        "metric": metric,
        "larger_is_better": study.sign > 0,
        "best": complete[0] if complete else None,
        "trials": [*complete, *others],
        "importance": study.importance(),
        "test": study.score or None,
    }


def _values(trial: FrozenTrial) -> dict[str, Any]:
    return {
        "trial": trial.number,
        "state": _STATES[trial.state],
        "overrides": list(trial.user_attrs.get(WORDS, ())),
        "step": trial.user_attrs.get(STEP),
        "seconds": trial.user_attrs.get(SECONDS),
        "reason": trial.user_attrs.get(REASON),
        "curve": [[step, encode_number(value)] for step, value in sorted(trial.intermediate_values.items())],
    }


def _half(values: Sequence[float]) -> float | None:
    """Return half of the width of the 95 % interval of a mean (Student's t); None for one value."""
    if len(values) < 2:
        return None
    return float(t.ppf((1 + _CONFIDENCE) / 2, len(values) - 1) * stdev(values) / len(values) ** 0.5)
