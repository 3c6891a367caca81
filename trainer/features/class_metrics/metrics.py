"""ROC AUC and average precision of classes, and metrics with a number for each class, computed by scikit-learn.

An undefined number is NaN: that of a class without rows and, for ROC AUC, of a class that all rows have. Averages leave
such classes out. With several classes, each is compared with all others together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from trainer.tasks.metrics.metric import Metric, Values


def _truth(labels: Values, num_classes: int) -> Values:
    """Return whether each row has each class, `[rows, classes]`, of labels `[rows]` or `[rows, classes]`."""
    return labels == 1 if labels.ndim == 2 else labels[:, None] == np.arange(num_classes)


def _number(score: str, truth: Values, probabilities: Values) -> float:
    """Return the score of one class, of arrays `[rows]`; NaN: it is undefined, or the model has diverged."""
    from sklearn import metrics

    rows = truth.sum()
    if not rows or (score == "roc_auc" and rows == len(truth)) or not np.isfinite(probabilities).all():
        return math.nan
    return float(getattr(metrics, f"{score}_score")(truth, probabilities))


def _numbers(score: str, probabilities: Values, labels: Values) -> Values:
    """Return the score of each class `[classes]`."""
    truth = _truth(labels, probabilities.shape[1])
    return np.array([_number(score, truth[:, place], probabilities[:, place]) for place in range(truth.shape[1])])


def _of_one(score: str) -> Metric:
    return Metric(lambda probabilities, labels: _number(score, labels == 1, probabilities), reads="probabilities")


def _micro(score: str) -> Metric:
    def compute(probabilities: Values, labels: Values) -> float:
        return _number(score, _truth(labels, probabilities.shape[1]).ravel(), probabilities.ravel())

    return Metric(compute, reads="probabilities")


def _mean(score: str, *, weighted: bool) -> Metric:
    """Return the mean over the classes that have the score, perhaps weighted by their rows."""

    def compute(probabilities: Values, labels: Values) -> float:
        numbers = _numbers(score, probabilities, labels)
        defined = ~np.isnan(numbers)
        rows = _truth(labels, len(numbers)).sum(0)[defined]
        return float(np.average(numbers[defined], weights=rows if weighted else None)) if defined.any() else math.nan

    return Metric(compute, reads="probabilities")


def _of_each_class(score: str) -> Metric:
    return Metric(lambda *given: _numbers(score, *given), reads="probabilities", of_classes=score)


def _decisions_of_each_class(score: str) -> Metric:
    """Return a metric of predictions, which takes the classes up to the last one that predictions or labels have."""

    def compute(predictions: Values, labels: Values) -> Values:
        from sklearn import metrics

        options: dict[str, Any] = {"average": None, "zero_division": 0}
        if labels.ndim == 2:
            predicted, true = predictions.sum(0), labels.sum(0)
        else:
            number = 1 + int(max(predictions.max(), labels.max()))
            options["labels"] = range(number)
            predicted, true = (np.bincount(classes, minlength=number) for classes in (predictions, labels))
        function: Callable[..., Values] = getattr(metrics, f"{score}_score")
        undefined = true == 0 if score == "recall" else predicted + true == 0
        return np.where(undefined, math.nan, function(labels, predictions, **options))

    return Metric(compute, of_classes=score)


ROC_AUC, AVERAGE_PRECISION = _of_one("roc_auc"), _of_one("average_precision")
ROC_AUC_MICRO, AVERAGE_PRECISION_MICRO = _micro("roc_auc"), _micro("average_precision")
ROC_AUC_MACRO, AVERAGE_PRECISION_MACRO = (_mean(one, weighted=False) for one in ("roc_auc", "average_precision"))
ROC_AUC_WEIGHTED, AVERAGE_PRECISION_WEIGHTED = (_mean(one, weighted=True) for one in ("roc_auc", "average_precision"))
F1_PER_CLASS, PRECISION_PER_CLASS, RECALL_PER_CLASS = map(_decisions_of_each_class, ("f1", "precision", "recall"))
ROC_AUC_PER_CLASS, AVERAGE_PRECISION_PER_CLASS = map(_of_each_class, ("roc_auc", "average_precision"))
