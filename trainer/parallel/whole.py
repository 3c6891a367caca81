"""Shards of tensors, and whole tensors gathered from them; a plain tensor is its own shard."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.placement import TENSOR_AXIS, ParameterPlacement, Split
from trainer.parallel.slicing import join_parts


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather_whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor on every rank that holds a shard; a collective for sharded tensors."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def tensor_splits(placement: ParameterPlacement, mesh: ParallelMesh) -> list[Split]:
    """Return the splits over the tensor axis, which precede sharding over data ranks."""
    return [split for split in placement.splits if split.axis == TENSOR_AXIS and mesh.size(split.axis) > 1]


def gather_on_rank_zero(
    tensors: Mapping[str, Tensor], placements: Mapping[str, ParameterPlacement], mesh: ParallelMesh
) -> dict[str, Tensor]:
    """Return all whole tensors on rank 0 and nothing on the others; a collective.

    Each gathered tensor moves to the CPU before the next, so a device holds at most one whole tensor.

    Args:
        tensors: this rank's tensors.
        placements: placements by the names of `tensors`. A tensor without one, or with fewer dimensions (a count of
            steps), is not split over the tensor axis.
        mesh: the ranks.
    """
    gathered = {}
    for name, tensor in tensors.items():
        whole = gather_whole(tensor)
        placement = placements.get(name)
        if placement is not None and whole.dim() == len(placement.shape):
            for split in tensor_splits(placement, mesh):
                whole = _join(whole, split, placement.shape, mesh)
        if mesh.is_first_replica:
            gathered[name] = whole.cpu() if whole is not tensor else tensor
    return mesh.to_rank_zero(gathered)


def _join(part: Tensor, split: Split, shape: tuple[int, ...], mesh: ParallelMesh) -> Tensor:
    parts = [torch.empty_like(part) for _ in range(mesh.size(split.axis))]
    dist.all_gather(parts, part.contiguous(), group=mesh.group(split.axis))
    return join_parts(parts, split, shape[split.dim or 0])
