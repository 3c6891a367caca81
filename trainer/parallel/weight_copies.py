"""Rounded copies of trained weights that stay between steps, because the optimizer writes them with the weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

_COPY = "kept_copy"  # the attribute of a weight with its copy


@dataclass
class KeptCopy:
    """The rounded copy of a weight, which its reader allocates and fills, and an optimizer then writes.

    Attributes:
        tensor: the copy, with the shape of the weight and perhaps other strides; None: nobody reads one.
        version: the version of the weight that it is the rounding of. Torch raises that of a weight at each change in
            place, so a change by anyone but the optimizer puts the copy out of date.
    """

    tensor: Tensor | None = None
    version: int | None = None

    def is_current(self, weight: Tensor) -> bool:
        return self.tensor is not None and self.version == weight._version


def kept_copy(weight: Tensor) -> KeptCopy | None:
    """Return the copy that the optimizer of a weight writes; None: it writes none."""
    return getattr(weight, _COPY, None)


def keep_copy(weight: Tensor) -> KeptCopy:
    """Let the readers of a weight keep its copy between steps: an optimizer promises to write it."""
    copy = KeptCopy()
    setattr(weight, _COPY, copy)
    return copy
