"""The table of metrics over a whole split, computed by numpy, scikit-learn and scipy."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping

import numpy as np

from trainer.base.errors import UsageError
from trainer.base.extensions import Registration, Table, consume, resolved
from trainer.tasks.metrics.metric import Metric, Values

# scikit-learn and scipy each take half a second to import, so the first evaluation imports them, not the start.


def _accuracy(predictions: Values, labels: Values) -> float:
    equal = predictions == labels
    # With several labels, a row is right only if all of its labels are.
    return float(np.mean(equal.all(axis=1) if equal.ndim == 2 else equal))


def _of_decisions(score: str, average: str) -> Callable[[Values, Values], float]:
    """Return F1, precision or recall of scikit-learn.

    Averages are over the classes that labels or predictions have, of recall over those of labels.
    """
    # Without rows of a class, its recall is undefined. A class that is never predicted has the precision 0.
    undefined = math.nan if score == "recall" else 0

    def compute(predictions: Values, labels: Values) -> float:
        from sklearn import metrics

        function = getattr(metrics, f"{score}_score")
        return float(function(labels, predictions, average=average, zero_division=undefined))

    return compute


def _matthews(predictions: Values, labels: Values) -> float:
    from sklearn.metrics import matthews_corrcoef

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn warns where all rows have one class; the value is 0
        return float(matthews_corrcoef(labels, predictions))


def _correlation(name: str) -> Callable[[Values, Values], float]:
    """Return a correlation of scipy; it is 0 if one side is constant, as the Matthews correlation."""

    def correlation(predictions: Values, labels: Values) -> float:
        from scipy import stats

        if np.ptp(predictions) == 0 or np.ptp(labels) == 0:
            return 0.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # scipy warns of nearly constant predictions; the value is valid
            return float(getattr(stats, name)(predictions.astype(float), labels.astype(float)).statistic)

    return correlation


def _mse(predictions: Values, labels: Values) -> float:
    # fp64, because the squares of large fp32 numbers overflow.
    return float(np.mean(np.square(predictions.astype(np.float64) - labels.astype(np.float64))))


def _share(num_right: Values, num_all: Values) -> float:
    return float(num_right.sum() / max(1, num_all.sum()))


def _perplexity(losses: Values, num_tokens: Values) -> float:
    """Return the exponential of the mean loss of a token; infinite on overflow, as after a divergence."""
    with np.errstate(over="ignore"):
        return float(np.exp(losses.sum() / max(1, num_tokens.sum())))


METRICS = Table[Metric](
    {
        "accuracy": Metric(_accuracy),
        **{
            score if average == "binary" else f"{score}_{average}": Metric(_of_decisions(score, average))
            for score in ("f1", "precision", "recall")
            for average in ("binary", "macro", "micro", "weighted")
        },
        "matthews": Metric(_matthews),
        "pearson": Metric(_correlation("pearsonr")),
        "spearman": Metric(_correlation("spearmanr")),
        "mse": Metric(_mse, greater_is_better=False),
        "token_accuracy": Metric(_share),
        "perplexity": Metric(_perplexity, greater_is_better=False),
    }
)


def _add(row: Registration) -> None:
    if row.name in _SHIPPED:
        raise UsageError(f"the metric {row.name!r} ships with trainer; register yours under another name")
    value = row.value["metric"] if isinstance(row.value, Mapping) else row.value  # a text of a folder names a `Metric`
    is_text = isinstance(value, str)
    METRICS[row.name] = value if is_text else Metric(resolved(value.compute), value.greater_is_better, value.reads)


# Before `consume`, which calls `_add` with the metrics that are registered already.
_SHIPPED = frozenset(METRICS)
consume("metric", _add)


def greater_is_better(metric: str) -> bool:
    """Return whether a larger value of `metric` (a name of the table, or "loss") is better."""
    return metric != "loss" and METRICS[metric].greater_is_better


def merit(metric: str, metrics: Mapping[str, float]) -> tuple[float, float]:
    """Return the order of evaluations by `metric`: the larger is the better one.

    Of equal values, the one with the lower loss is better. NaN is worse than all numbers.
    """
    values = (metrics[metric] if greater_is_better(metric) else -metrics[metric], -metrics.get("loss", math.inf))
    # Comparisons with NaN are false, so it could never be replaced as the best value.
    first, second = (-math.inf if math.isnan(value) else value for value in values)
    return first, second
