"""The tolerances of docs/numerics.md, and the difference that they limit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

TOLERANCES: Mapping[str, tuple[float, float]] = {
    "fp32": (1e-5, 1e-4),
    # The next number after 1 is 2**-10 away in fp16, and 2**-7 in bf16.
    "fp16": (2**-10 / 8, 2**-10),
    "bf16": (2**-7 / 8, 2**-7),
}
"""Relative tolerances of the loss and the gradient norm of a step (docs/numerics.md), the tightest first."""


def tolerance(types: Iterable[str], of_optimizer: tuple[float, float] | None) -> tuple[float, float]:
    """Return the tolerances of loss and norm for the types of products and messages, and for an optimizer."""
    # Tuples compare by the loss first; the tolerances are listed from tight to wide in both numbers.
    return max(*(TOLERANCES[name] for name in types), of_optimizer or TOLERANCES["fp32"])


def difference(value: float, reference: float) -> float:
    """Return the difference of two values relative to the reference; infinite where only one of them is finite."""
    if value == reference or (math.isnan(value) and math.isnan(reference)):
        return 0.0
    difference = abs(value - reference) / abs(reference) if reference else math.inf
    return difference if math.isfinite(difference) else math.inf
