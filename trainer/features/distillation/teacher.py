"""A frozen teacher; a model learns from its outputs beside the labels (Hinton et al. 2015, arXiv:1503.02531)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.features.distillation.divergence import vocab_parallel_divergence
from trainer.features.distillation.section import Distillation
from trainer.models.added_loss import AddedLoss
from trainer.parallel.tensor.cross_entropy import VocabularyCut


class Teacher(AddedLoss):
    """A model in evaluation mode, without gradients, and the loss that its outputs add.

    Args:
        columns: the teacher's class at the place of each class of the student; None: the classes have the same order.
        vocabulary: how the logits are sharded over tensor ranks; None if they are whole.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Distillation,
        constants: Mapping[str, Any],
        columns: Sequence[int] | None = None,
        vocabulary: VocabularyCut | None = None,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self._weight, self._temperature = settings.weight, settings.temperature
        self._constants = constants
        self._columns = columns
        self._vocabulary = vocabulary
        self._known = _arguments(model)

    @torch.no_grad()
    def outputs(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the teacher's logits for the inputs of a microbatch, in the order of the student's classes."""
        known = {name: tensor for name, tensor in inputs.items() if name in self._known}
        logits: Tensor = self.model(**known, **self._constants).logits
        return logits if self._columns is None else logits[..., list(self._columns)]

    def mixed(self, loss: Tensor, logits: Tensor, outputs: Tensor, label_weights: Tensor) -> Tensor:
        """Return `(1 - weight) * loss + weight * temperature**2 * divergence`, a sum over the labels."""
        cut = self._vocabulary or VocabularyCut(None, logits.shape[-1])
        divergences = vocab_parallel_divergence(logits, outputs, cut.group, cut.size, self._temperature)
        # The gradient of the divergence shrinks with the square of the temperature (Hinton et al. 2015, section 2).
        taught_loss = self._temperature**2 * (divergences * label_weights).sum()
        return (1.0 - self._weight) * loss + self._weight * taught_loss


def _arguments(model: nn.Module) -> set[str]:
    """Return the arguments that a model or its base model names; others, such as segments, are not for it."""
    forwards = (type(module).forward for module in (model, getattr(model, "base_model", model)))
    return {name for forward in forwards for name in inspect.signature(forward).parameters}
