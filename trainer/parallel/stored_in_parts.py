"""Frozen weights that are held as several tensors; modules that ask for them know no form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

import torch
from torch import Tensor, nn

CODES = "codes"
"""The name of the largest tensor of each form."""


class StoredInParts(nn.Module):
    """A weight of `shape` that is held as several tensors; the largest has the name `CODES`."""

    shape: tuple[int, ...]

    def encoded(self, weight: Tensor) -> Mapping[str, Tensor]:
        """Return the tensors of a weight, by the names of the parameters."""
        raise NotImplementedError

    def decoded(self, dtype: torch.dtype, parts: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the weight in a type, from its parameters or from other tensors of its form."""
        raise NotImplementedError

    def rounded(self, weight: Tensor) -> Tensor:
        """Return a weight as the products use it once it is encoded, in fp32."""
        raise NotImplementedError


class LinearInParts(nn.Module):
    """A linear layer with a weight that is held in parts, `[..., in] -> [..., out]`."""

    weight: StoredInParts
    bias: nn.Parameter | None

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product of the weight with `x`, and the sum with a bias."""
        raise NotImplementedError


def weights_in_parts(model: nn.Module) -> dict[str, StoredInParts]:
    """Return the weights of a model that are held in parts, by the names that they have in the whole model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, StoredInParts)}


def sizes_of_parts(models: Iterable[nn.Module]) -> dict[str, int]:
    """Return the number of weights that a tensor of a weight in parts stands for, by its name: all, or none."""
    return {
        f"{name}.{part}": prod(weight.shape) if part == CODES else 0
        for model in models
        for name, weight in weights_in_parts(model).items()
        for part, _ in weight.named_parameters()
    }
