"""A metric over a whole split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from numpy.typing import NDArray

Values: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class Metric:
    """A metric: `compute(predictions, labels)`, both of shape `[rows]`, and its direction.

    With several labels for each row, both are 0 or 1, of shape `[rows, num_labels]`.
    For tasks that label tokens, the arguments are sums over the labelled tokens of each row, and the numbers of these
    tokens.
    """

    compute: Callable[[Values, Values], float]
    greater_is_better: bool = True
