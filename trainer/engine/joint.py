"""Losses of rows that depend on each other, over the microbatches and ranks of a step, by gradient caching.

Gradient caching (Gao et al. 2021, arXiv:2101.06983): a first pass without gradients computes the scores of all rows.
The loss and its gradient with respect to the scores are computed once. A second pass runs the backward pass of each
microbatch from the cached gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trainer.parallel.copying import to_device
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.microbatch import Microbatch, RankBatch
from trainer.tasks.task import Task


class InnerLoss(Protocol):
    """A loss of parts of a model, such as routers, which adds its gradients in the backward passes of a step."""

    adds: bool  # whether it adds gradients, which a captured pass would not follow; else it has numbers only

    def begin(self, batch: RankBatch, scale: Tensor | None) -> bool:
        """Begin a step, and return whether a first pass of all microbatches, without gradients, must come before."""

    def counted(self) -> None:
        """Follow the end of a first pass, also of one that the losses of rows need."""

    def running(self, microbatch: Microbatch) -> AbstractContextManager[object]:
        """Return a context around the forward pass of a microbatch, but not around its recomputation."""

    def finish(self, share: Tensor) -> tuple[Tensor, Callable[[], Mapping[str, float]]]:
        """Add this rank's share of the loss after the passes; return a reader of numbers for the record of the step."""

    def updated(self, flag: Tensor) -> None:
        """Follow the update of the weights; `flag` is 1.0 if there was none in a bad step, else 0.0."""


@dataclass(frozen=True)
class JointLosses:
    """The loss of each row of the global batch `[rows]`, and the gradient of their sum with respect to the scores.

    `gradient` has the shape of the scores of all rows, `[rows, ...]`.
    """

    losses: Tensor
    gradient: Tensor

    def sum_of(self, rows: Tensor, scores: Tensor) -> Tensor:
        """Return the sum of the losses of `rows` `[batch]`, a scalar with the cached gradient.

        Args:
            rows: the index of each row in the global batch.
            scores: the scores of these rows `[batch, ...]`, with a graph.
        """
        # Their difference is 0, but its gradient with respect to the scores is the cached one.
        product = (scores * self.gradient[rows]).sum()
        return self.losses[rows].sum() + (product - product.detach())


@torch.no_grad()
def joint_losses(
    task: Task, mesh: ParallelMesh, num_rows: int, microbatches: Sequence[Microbatch], scores: Sequence[Tensor]
) -> JointLosses:
    """Return the losses of all rows of the global batch, equal on all data ranks; a collective over the data axis.

    Args:
        task: the task, with `rows_depend`.
        scores: the scores of each microbatch `[batch, ...]`, those of fillers included.
    """
    # A row's index in the global batch is its place here, so all layouts build the same tensor.
    shape = (num_rows, *scores[0].shape[1:])
    every = torch.zeros(shape, dtype=scores[0].dtype, device=mesh.device)
    # Fillers have labels of the right shape too, so every rank allocates tensors of equal shape for the collective.
    of_row = task.row_labels(microbatches[0].labels).shape[1:]
    has_labels = 0 not in of_row
    # fp64 holds integer labels exactly, and float labels of fp32 too.
    labels = torch.zeros((num_rows, *of_row) if has_labels else num_rows, dtype=torch.float64, device=mesh.device)
    for microbatch, part in zip(microbatches, scores, strict=True):
        if not microbatch.filler:
            rows = to_device(microbatch.rows, mesh.device)
            every[rows] = part.to(mesh.device)
            if has_labels:
                labels[rows] = to_device(task.row_labels(microbatch.labels), mesh.device).to(labels.dtype)
    # Each row is on one rank, and the others add zeros, so the sum gathers the rows in their order, without rounding.
    mesh.sum_(every, "dp")
    mesh.sum_(labels, "dp")
    with torch.enable_grad():
        # Every rank computes the whole loss. It is small beside the model, and needs no second collective.
        losses = task.joint_losses(every.requires_grad_(), labels)
        (gradient,) = torch.autograd.grad(losses.sum(), every)
    return JointLosses(losses.detach(), gradient)
