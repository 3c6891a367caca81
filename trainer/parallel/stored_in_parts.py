"""The kind of quantised weights, for modules that ask for them and quantise none."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

CODES = "codes"
"""The name of the largest tensor of each format."""


class StoredInParts(nn.Module):
    """A weight of `shape` that is held as several tensors, the largest of which is named `CODES`."""

    shape: tuple[int, ...]

    def quantize(self, weight: Tensor) -> Mapping[str, Tensor]:
        """Return the tensors of a weight, by the names of the parameters."""
        raise NotImplementedError

    def dequantized(self, dtype: torch.dtype, parts: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the weight in a type, from its own tensors or from others of its format."""
        raise NotImplementedError

    def rounded(self, weight: Tensor) -> Tensor:
        """Return a weight as the products use it after its quantisation, in fp32."""
        raise NotImplementedError
