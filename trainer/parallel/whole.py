"""Between a tensor's shards and the whole of it; a plain tensor is its own shard."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.parallel.mesh import ParallelMesh


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds: the same memory, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather_whole(tensor: Tensor) -> Tensor:
    """The whole tensor, on every rank that holds a part; a collective where it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(whole: Tensor, pattern: Tensor) -> Tensor:
    """`whole`, which every rank has, cut as `pattern` is and on its device; no communication."""
    if not isinstance(pattern, DTensor):
        return whole.to(pattern.device, copy=True)
    return distribute_tensor(
        whole.to(pattern.to_local().device), pattern.device_mesh, pattern.placements, src_data_rank=None
    )


@torch.no_grad()
def copy_whole_(target: Tensor, whole: Tensor) -> None:
    """Gives `target` its part of `whole`, in place."""
    local_part(target).copy_(local_part(shard_like(whole, target)))


def gather_on_rank_zero(tensors: Mapping[str, Tensor], mesh: ParallelMesh) -> dict[str, Tensor]:
    """The whole of every tensor on rank 0; nothing is kept on the others. All ranks must call it.

    What was gathered is on the CPU, one tensor after the other, so that no device holds more than one whole tensor.
    """
    gathered = {}
    for name, tensor in tensors.items():
        whole = gather_whole(tensor)
        if mesh.rank == 0:
            gathered[name] = whole.cpu() if whole is not tensor else tensor
    return gathered
