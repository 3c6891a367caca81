"""The closed table of metrics, computed over a whole split by scikit-learn and scipy."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainer.base.errors import UsageError
from trainer.base.extensions import Registration, consume, resolved

Values: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class Metric:
    """`compute(predictions, labels)`, each `[rows]`, and which way is better.

    Of tasks that label tokens, these are sums over the labelled tokens of each row, and their numbers.
    """

    compute: Callable[[Values, Values], float]
    greater_is_better: bool = True


# scikit-learn and scipy take half a second each to import; the first evaluation pays for it, not the start.


def _accuracy(predictions: Values, labels: Values) -> float:
    return float(np.mean(predictions == labels))


def _f1(predictions: Values, labels: Values) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predictions, average="binary", pos_label=1, zero_division=0))


def _f1_macro(predictions: Values, labels: Values) -> float:
    """The mean over the classes that occur in the labels or in the predictions: F1 is not defined for others."""
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predictions, average="macro", zero_division=0))


def _matthews(predictions: Values, labels: Values) -> float:
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(labels, predictions))


def _pearson(predictions: Values, labels: Values) -> float:
    from scipy import stats

    return _correlation(stats.pearsonr, predictions, labels)


def _spearman(predictions: Values, labels: Values) -> float:
    from scipy import stats

    return _correlation(stats.spearmanr, predictions, labels)


def _correlation(function: Callable[..., Any], predictions: Values, labels: Values) -> float:
    """Zero where one side is constant, as Matthews has it: the correlation is not defined, and nothing was learned."""
    if np.ptp(predictions) == 0 or np.ptp(labels) == 0:
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "nearly constant": early predictions are, and the value still stands
        return float(function(predictions.astype(np.float64), labels.astype(np.float64)).statistic)


def _mse(predictions: Values, labels: Values) -> float:
    return float(np.mean(np.square(predictions.astype(np.float64) - labels.astype(np.float64))))


def _token_accuracy(num_right: Values, num_tokens: Values) -> float:
    return float(num_right.sum() / max(1, num_tokens.sum()))


def _perplexity(losses: Values, num_tokens: Values) -> float:
    """The exponential of the mean loss of a token; infinite where that has no number, as it is at a divergence."""
    with np.errstate(over="ignore"):
        return float(np.exp(losses.sum() / max(1, num_tokens.sum())))


METRICS: dict[str, Metric] = {
    "accuracy": Metric(_accuracy),
    "f1": Metric(_f1),
    "f1_macro": Metric(_f1_macro),
    "matthews": Metric(_matthews),
    "pearson": Metric(_pearson),
    "spearman": Metric(_spearman),
    "mse": Metric(_mse, greater_is_better=False),
    "token_accuracy": Metric(_token_accuracy),
    "perplexity": Metric(_perplexity, greater_is_better=False),
}


def _add(row: Registration) -> None:
    if row.name in _SHIPPED:
        raise UsageError(f"the metric {row.name!r} ships with trainer; register yours under another name")
    METRICS[row.name] = Metric(resolved(row.value.compute), row.value.greater_is_better)


_SHIPPED = frozenset(METRICS)
consume("metric", _add)


def greater_is_better(metric: str) -> bool:
    """Whether a larger value of `metric` (a name of the table, or "loss") is the better one."""
    return metric != "loss" and METRICS[metric].greater_is_better
