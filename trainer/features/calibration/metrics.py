"""The calibration error, the Brier score, and the threshold of each class with the best F1.

Probabilities are `[rows, classes]`, labels `[rows]`, or `[rows, classes]` with several labels for each row. After a
divergence, all numbers are NaN.
"""

from __future__ import annotations

import math

import numpy as np

from trainer.tasks.metrics.metric import Metric, Values

NUM_BINS = 15


def _decisions(probabilities: Values, labels: Values) -> tuple[Values, Values]:
    """Return the confidence of each decision, and whether it is right: of the top class, or of each label."""
    wide = probabilities.astype(np.float64)
    if labels.ndim == 2:
        return wide.ravel(), labels.ravel() == 1
    top = wide.argmax(1)
    return wide[np.arange(len(top)), top], top == labels


def reliability(probabilities: Values, labels: Values) -> tuple[Values, Values, Values]:
    """Return the decisions, the mean confidence and the share of right ones in each of `NUM_BINS` bins, `[bins]`.

    The bins have equal widths, and each has its upper edge. The mean and the share of an empty bin are 0.
    """
    confidence, right = _decisions(probabilities, labels)
    inner = np.linspace(0, 1, NUM_BINS + 1)[1:-1]
    bins = np.searchsorted(inner, confidence)
    counts = np.bincount(bins, minlength=NUM_BINS)
    sums = (np.bincount(bins, weights=values, minlength=NUM_BINS) for values in (confidence, right))
    mean, share = (values / np.maximum(1, counts) for values in sums)
    return counts, mean, share


def _ece(probabilities: Values, labels: Values) -> float:
    """Return the expected calibration error (Naeini et al. 2015; of the top class as Guo et al. 2017)."""
    if not np.isfinite(probabilities).all():
        return math.nan
    counts, mean, share = reliability(probabilities, labels)
    return float(np.average(np.abs(mean - share), weights=counts))


def _picture(probabilities: Values, labels: Values) -> dict[str, list[float]]:
    """Return the points of a reliability diagram, without empty bins."""
    counts, mean, share = reliability(np.nan_to_num(probabilities), labels)
    held = counts > 0
    return {"rows": counts[held].tolist(), "confidence": mean[held].tolist(), "right": share[held].tolist()}


def _brier(probabilities: Values, labels: Values) -> float:
    """Return the Brier score (Brier 1950): that of the positive class for two classes, else the sum over classes."""
    wide = probabilities.astype(np.float64)
    if labels.ndim == 2:
        return float(np.square(wide - labels).mean())
    squares = np.square(wide - np.eye(wide.shape[1])[labels]).sum(1)
    return float(squares.mean()) / (2 if wide.shape[1] == 2 else 1)


def _best(truth: Values, probabilities: Values) -> tuple[float, float]:
    """Return the threshold with the best F1 of one class, and that F1, given arrays `[rows]`.

    The threshold lies in the middle between two neighbouring probabilities; of equal F1, it is nearest to 0.5.
    """
    if not truth.any() or not np.isfinite(probabilities).all():
        return math.nan, math.nan
    order = np.argsort(-probabilities, kind="stable")
    ranked, right = probabilities[order].astype(np.float64), np.cumsum(truth[order])
    f1 = 2 * right / (np.arange(1, len(ranked) + 1) + right[-1])
    following: Values = np.append(ranked[1:], 0.0)
    f1[ranked == following] = -1.0  # equal probabilities are on one side
    middles = (ranked + following) / 2
    best = np.flatnonzero(f1 == f1.max())
    place = best[np.abs(middles[best] - 0.5).argmin()]
    return float(middles[place]), float(f1[place])


def _best_of_classes(probabilities: Values, labels: Values) -> Values:
    """Return the best threshold and its F1 `[classes, 2]`."""
    truth = labels == 1 if labels.ndim == 2 else labels[:, None] == np.arange(probabilities.shape[1])
    return np.array([_best(truth[:, place], column) for place, column in enumerate(probabilities.T)])


def _of_best(place: int, name: str) -> Metric:
    return Metric(lambda *given: _best_of_classes(*given)[:, place], reads="probabilities", of_classes=name)


ECE = Metric(_ece, greater_is_better=False, reads="probabilities", picture=_picture)
BRIER = Metric(_brier, greater_is_better=False, reads="probabilities")
BEST_THRESHOLD_PER_CLASS, BEST_F1_PER_CLASS = _of_best(0, "best_threshold"), _of_best(1, "best_f1")
