"""The global gradient norm: split parameters summed over their axes, whole ones counted once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from trainer.parallel.dtypes import at_least_fp32
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.placement import PIPELINE_AXIS, ParameterPlacement
from trainer.parallel.whole import local_part


def global_grad_norm(parameters: Iterable[tuple[nn.Parameter, ParameterPlacement]], mesh: ParallelMesh) -> Tensor:
    """The 2-norm of the gradient of the whole model, a scalar (fp32 at least) on the mesh's device.

    Gradients must be complete: summed over every axis in which they were partial. Parameters without a gradient
    (frozen, or unused) count as zero. The norm of each parameter is taken first and then combined, so that a large
    model does not overflow in a low precision. The ranks of one pipeline stage hold the same kinds of parameters; those
    of different stages meet at the end only.
    """
    by_axes: dict[tuple[str, ...], list[Tensor]] = defaultdict(list)
    for parameter, placement in parameters:
        if placement.is_copy:  # counted on another stage
            continue
        gradients = by_axes[placement.split_axes]  # also where this rank has none: all ranks must join the sums below
        if parameter.grad is not None:
            gradients.append(local_part(parameter.grad))
    total = torch.zeros((), device=mesh.device, dtype=torch.float32)
    for axes, gradients in sorted(by_axes.items()):
        square = torch.zeros((), device=mesh.device, dtype=torch.float32)
        if gradients:
            norms = at_least_fp32(torch.stack(torch._foreach_norm(gradients, 2)))
            square = norms.square().sum().to(mesh.device)
        for axis in axes:
            mesh.sum_(square, axis)
        total = total + square
    if mesh.size(PIPELINE_AXIS) > 1:  # stages without a gradient would else send another type than the rest
        total = mesh.sum_(total.double(), PIPELINE_AXIS)
    return total.sqrt()


def clip_factor(norm: float, max_norm: float | None) -> float:
    """What all gradients are multiplied with so that their norm is at most `max_norm`; 1 where it is already."""
    return 1.0 if max_norm is None or norm <= max_norm else max_norm / (norm + 1e-6)


def multiply_gradients_(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiplies all gradients by `factor`, in place."""
    gradients = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if factor != 1.0 and gradients:
        torch._foreach_mul_(gradients, factor)
