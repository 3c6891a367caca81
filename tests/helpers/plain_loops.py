"""Plain loops of gradient descent over transformers' models, beside which the engine trains the same batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.training import TinyTraining
from trainer.parallel.microbatch import Microbatch, RankBatch


def losses_of_both(
    training: TinyTraining, model: nn.Module, loss_of: Callable[[RankBatch], Tensor], rate: float, **tolerance: float
) -> list[float]:
    """Train the weights of the engine in a loop on `loss_of(batch)`, and compare the loss of each step with it."""
    model.load_state_dict(training.model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    losses = []
    for batch in training.loader:
        loss = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        assert training.engine.train_step(batch).loss == pytest.approx(losses[-1], **tolerance)
    return losses


def mean_of_rows(losses_of: Callable[[Microbatch], Iterable[Tensor]]) -> Callable[[RankBatch], Tensor]:
    """Return a function that takes the mean of the losses of the single rows of a batch."""

    def mean(batch: RankBatch) -> Tensor:
        losses = [loss for microbatch in batch.microbatches for loss in losses_of(microbatch)]
        assert len(losses) == batch.num_rows
        return torch.stack(losses).mean()

    return mean


def mean_of_batch(model: Any) -> Callable[[RankBatch], Tensor]:
    """Return a function that takes the loss which the model computes for all rows of a batch, padded."""

    def mean(batch: RankBatch) -> Tensor:
        parts = [(m.inputs, m.labels) for m in batch.microbatches]
        inputs = {key: _stacked([part[key] for part, _ in parts], 0) for key in ("input_ids", "attention_mask")}
        loss: Tensor = model(**inputs, labels=_stacked([labels for _, labels in parts], -100)).loss
        return loss

    return mean


def _stacked(tensors: list[Tensor], fill: int) -> Tensor:
    if tensors[0].dim() == 1:
        return torch.cat(tensors)
    width = max(tensor.shape[1] for tensor in tensors)
    return torch.cat([nn.functional.pad(tensor, (0, width - tensor.shape[1]), value=fill) for tensor in tensors])
