"""Scores of rows from training dynamics.

Area under the margin: the mean margin of a row over all epochs (Pleiss et al. 2020, arXiv:2001.10528). Confident
learning: rows that are confidently of another class, by thresholds for each class (Northcutt et al. 2021,
arXiv:1911.00068). Forgetting: how often a row was right and then wrong (Toneva et al. 2019, arXiv:1812.05159).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROUNDING = 1e-6  # of probabilities at a threshold


@dataclass(frozen=True)
class RowScores:
    """Scores of rows, each `[rows]`; NaN and -1 for rows without a record.

    `margin`, `label` and `believed` are None without classes, and `probabilities` `[rows, classes]` with many of them.
    Label, believed class and position are those of the last record; with probabilities, the class of the largest mean.
    """

    number: NDArray[np.int64]  # of records
    loss: NDArray[np.float64]
    margin: NDArray[np.float64] | None = None
    label: NDArray[np.int64] | None = None
    believed: NDArray[np.int64] | None = None
    position: NDArray[np.int64] | None = None
    forgotten: NDArray[np.int64] | None = None
    probabilities: NDArray[np.float64] | None = None

    @property
    def ranked(self) -> NDArray[np.int64]:
        """The rows with a record, the most suspicious first: by the mean margin, or else by the mean loss."""
        order = np.argsort(-self.loss if self.margin is None else self.margin, kind="stable")
        return order[self.number[order] > 0]


def scores_of(records: NDArray[Any], rows: NDArray[np.int64], size: int) -> RowScores:
    """Return the scores of `size` rows.

    Args:
        records: a record of each step and place, sorted by step.
        rows: the row of each record.
    """
    number = np.bincount(rows, minlength=size)

    def mean(values: NDArray[Any]) -> NDArray[np.float64]:
        with np.errstate(invalid="ignore"):
            return np.bincount(rows, values.astype(np.float64), size) / number

    names = records.dtype.names or ()
    loss = mean(records["loss"])
    if "margin" not in names:
        return RowScores(number, loss)
    last: NDArray[np.int64] = np.full(size, -1, np.int64)
    last[rows] = np.arange(len(rows))  # the latest record is written last

    def latest(name: str) -> NDArray[np.int64]:
        return np.where(last >= 0, records[name][last].astype(np.int64), -1)

    probabilities = None
    believed = latest("believed")
    if "probabilities" in names:
        probabilities = np.stack([mean(column) for column in records["probabilities"].T], axis=1)
        believed = np.where(number > 0, np.nan_to_num(probabilities).argmax(1), -1)
    position = latest("position") if "position" in names else None
    # Windows without a label have an infinite margin.
    margins = np.where(np.isfinite(records["margin"]), records["margin"], np.float32(0))
    forgotten = _forgotten(records["margin"] > 0, rows, size)
    return RowScores(number, loss, mean(margins), latest("label"), believed, position, forgotten, probabilities)


def _forgotten(is_right: NDArray[np.bool_], rows: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    order = np.argsort(rows, kind="stable")  # the records of a row stay in the order of steps
    right, of_row = is_right[order], rows[order]
    events = right[:-1] & ~right[1:] & (of_row[:-1] == of_row[1:])
    return np.bincount(of_row[1:][events], minlength=size)


def confident_issues(probabilities: NDArray[np.float64], labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return the rows off the diagonal of the confident joint.

    The threshold of a class is the mean probability of the class among the rows with its label. A row counts for the
    most probable class of those that reach their threshold.

    Args:
        probabilities: of each row and class `[rows, classes]`.
        labels: the class of each row `[rows]`.
    """
    number = probabilities.shape[1]
    counts = np.bincount(labels, minlength=number)
    own = probabilities[np.arange(len(labels)), labels]
    sums = np.bincount(labels, own, number)
    thresholds = np.where(counts > 0, sums / np.maximum(counts, 1), np.inf) - _ROUNDING
    reached = probabilities >= thresholds
    confident = np.where(reached, probabilities, -1.0).argmax(1)
    issues: NDArray[np.bool_] = reached.any(1) & (confident != labels)
    return issues
