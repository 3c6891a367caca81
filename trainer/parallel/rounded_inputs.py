"""Inputs of matrix products in 16 bits, which a feature may round once for all products that share an input."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

COPY = "rounded_copy"
"""The attribute of an input with its copy."""


class RoundedCopy(Protocol):
    """The rounded copy of a tensor for products."""

    exact: Tensor  # in fp32, for the other users of the tensor
    version: int  # of the tensor; a change in place raises it, and the copy is then out of date


def after_products(x: Tensor) -> Tensor:
    """Return `x` for a user after the products that share its copy, such as a residual connection.

    The gradients of these products are then added to that of the user, without a sum of their own.
    """
    copy = current_copy(x)
    return x if copy is None else copy.exact


def current_copy(x: Tensor) -> RoundedCopy | None:
    copy: RoundedCopy | None = getattr(x, COPY, None)
    return copy if copy is not None and copy.version == x._version else None
