"""Gradients of replicated parameters that are partial sums on each tensor rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from trainer.parallel.gradients import change_as_one_
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.placement import TENSOR_AXIS, ParameterPlacement
from trainer.parallel.shards.gathering import local_part


def is_partial(placement: ParameterPlacement, mesh: ParallelMesh) -> bool:
    """Return whether the gradient must be summed over the tensor ranks of the mesh."""
    return TENSOR_AXIS in placement.partial_over and mesh.size(TENSOR_AXIS) > 1


@torch.no_grad()
def sum_partial_gradients_(
    parameters: Iterable[tuple[nn.Parameter, ParameterPlacement]],
    mesh: ParallelMesh,
    sent_in: torch.dtype | None = None,
) -> None:
    """Sum the partial gradients over the tensor ranks, in place, with one all-reduce for all of them.

    The gradients may be sharded over the data ranks, alike on all tensor ranks. They are sent in the type `sent_in`;
    None: in their own.
    """
    gradients = [
        local_part(p.grad) for p, placement in parameters if p.grad is not None and is_partial(placement, mesh)
    ]
    if not gradients:
        return
    change_as_one_(gradients, lambda flat: mesh.sum_(flat, TENSOR_AXIS), sent_in)


def sum_while_backward(parameter: nn.Parameter, mesh: ParallelMesh, sent_in: torch.dtype | None = None) -> None:
    """Sum a partial gradient in each backward pass, for engines that consume gradients during it."""
    parameter.register_hook(lambda gradient: _summed(gradient, mesh, sent_in))  # type: ignore[no-untyped-call]


def _summed(gradient: Tensor, mesh: ParallelMesh, sent_in: torch.dtype | None) -> Tensor:
    sent = gradient.to(sent_in or gradient.dtype, copy=True, memory_format=torch.contiguous_format)
    return mesh.sum_(sent, TENSOR_AXIS).to(gradient.dtype)
