"""Quantised weights of a model, for modules that ask for them and quantise none."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from torch import nn

from trainer.parallel.stored_in_parts import CODES, StoredInParts


def quantized_in(model: nn.Module) -> dict[str, StoredInParts]:
    """Return the quantised weights of a model, by the names that they have in the whole model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, StoredInParts)}


def weights_of_parts(models: Iterable[nn.Module]) -> dict[str, int]:
    """Return the number of weights that a tensor of a quantised weight stands for, by its name: all, or none."""
    return {
        f"{name}.{part}": prod(weight.shape) if part == CODES else 0
        for model in models
        for name, weight in quantized_in(model).items()
        for part, _ in weight.named_parameters()
    }
