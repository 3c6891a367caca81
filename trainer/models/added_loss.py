"""A loss of rows that the outputs of a second model add to that of the task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn


class AddedLoss(Protocol):
    """The loss of a second model, which is no part of the trained one: no optimizer and no checkpoint sees it."""

    model: nn.Module

    def outputs(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the outputs `[batch, ...]` for the inputs of a microbatch."""

    def mixed(self, loss: Tensor, logits: Tensor, outputs: Tensor, label_weights: Tensor) -> Tensor:
        """Return the loss of the labels with the added one, a sum over the labels.

        Args:
            loss: the sum of the losses of the labels.
            logits: those of the trained model `[batch, ..., classes]`, or this rank's shard of the vocabulary.
            outputs: the result of `outputs` for the same rows.
            label_weights: the weight of each label `[batch, ...]`, zero for ignored ones.
        """
