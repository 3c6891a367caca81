"""Between a tensor's shards and the whole of it; a plain tensor is its own shard."""

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
    """What this rank holds: the same memory, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather_whole(tensor: Tensor) -> Tensor:
    """The whole tensor, on every rank that holds a part; a collective where it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def tensor_splits(placement: ParameterPlacement, mesh: ParallelMesh) -> list[Split]:
    """The cuts that are made before any sharding: plain tensors are the parts."""
    return [split for split in placement.splits if split.axis == TENSOR_AXIS and mesh.size(split.axis) > 1]


def gather_on_rank_zero(
    tensors: Mapping[str, Tensor], placements: Mapping[str, ParameterPlacement], mesh: ParallelMesh
) -> dict[str, Tensor]:
    """The whole of every tensor on rank 0; nothing is kept on the others. All ranks must call it.

    What was gathered is on the CPU, one tensor after the other, so that no device holds more than one whole tensor.

    Args:
        tensors: of this rank.
        placements: by the names of `tensors`; one that is not there, or that has not its placement's dimensions (a
            count of steps), is not cut over the tensor axis.
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
