"""A metric over a whole split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from numpy.typing import NDArray

Values: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class Metric:
    """A metric: `compute(predictions, labels)`, both of shape `[rows]`, and its direction.

    With several labels for each row, both are 0 or 1, of shape `[rows, num_labels]`.
    For tasks that label tokens, the arguments are sums over the labelled tokens of each row, and their numbers.

    `reads` is the first argument; probabilities are `[rows, num_labels]`, or `[rows]` of one class. `of_classes` is
    the prefix of a metric with a number for each class, "f1" of "f1/CLASS"; it may lack the last classes.
    """

    compute: Callable[[Values, Values], Any]
    greater_is_better: bool = True
    reads: Literal["predictions", "probabilities"] = "predictions"
    of_classes: str | None = None
    picture: Callable[[Values, Values], Any] | None = None  # JSON for the report, from probabilities and labels
