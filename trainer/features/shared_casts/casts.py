"""The casts of a model with products in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers.pytorch_utils import Conv1D

from trainer.engine.products import products
from trainer.features.shared_casts.inputs import share_rounded_inputs
from trainer.features.shared_casts.weights import StepWeights


class SharedCasts:
    """Casts of inputs and of weights, with the numbers of autocast."""

    weights = StepWeights

    def share_inputs(self, model: nn.Module) -> None:
        share_rounded_inputs(_plain_products(model))


def _plain_products(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that use their input in one matrix product only: those of one process without adapters."""
    for _, module in products(model):
        # Exact types: a subclass, or a layer with adapters inside, may read its input more than once.
        if type(module) in (nn.Linear, Conv1D) and not any(module.children()):
            yield module
