"""Shards of tensors, and whole tensors gathered from them; a plain tensor is its own shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.placement import PIPELINE_AXIS, SHARD_AXES, ParameterPlacement, Split
from trainer.parallel.shards.slices import join_parts, part_of


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def tensor_splits(placement: ParameterPlacement, mesh: ParallelMesh) -> list[Split]:
    """Return the splits of the model itself, which precede sharding over data ranks."""
    return [split for split in placement.splits if split.axis not in SHARD_AXES and mesh.size(split.axis) > 1]


def is_whole(parameter: Tensor, placement: ParameterPlacement, mesh: ParallelMesh) -> bool:
    """Return whether this rank's part of a parameter is the whole one."""
    return not isinstance(parameter, DTensor) and not tensor_splits(placement, mesh)


def gather_on_all(part: Tensor, parameter: Tensor, placement: ParameterPlacement, mesh: ParallelMesh) -> Tensor:
    """Return the whole tensor on every rank with a part; without shards, `part` itself.

    Args:
        part: a plain tensor, laid out as this rank's part of `parameter`.
    """
    return join_whole(laid_out_as(part, parameter), placement, mesh)


def laid_out_as(part: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's part of a tensor as a shard like that of `parameter`."""
    if not isinstance(parameter, DTensor):
        return part
    kind, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
    return DTensor.from_local(part, kind, parameter.placements, run_check=False, shape=shape, stride=stride)


def part_like(whole: Tensor, parameter: Tensor, placement: ParameterPlacement, mesh: ParallelMesh) -> Tensor:
    """Return this rank's part of a whole tensor, laid out as `parameter`, without communication."""
    # The tensor axis cuts first, and FSDP cuts its part; `join_whole` goes the other way.
    for split in tensor_splits(placement, mesh):
        whole = part_of(whole, split, mesh.index(split.axis), mesh.size(split.axis))
    if not isinstance(parameter, DTensor):
        return whole
    # Every rank has the whole tensor, so torch cuts it without a broadcast (`src_data_rank`).
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()


def join_whole(tensor: Tensor, placement: ParameterPlacement, mesh: ParallelMesh) -> Tensor:
    """Return a whole tensor on every rank of its pipeline stage; a collective of these ranks.

    Args:
        tensor: this rank's part. One with fewer dimensions (a count of steps) is not split over the tensor axis.
    """
    # Data shards lie within the part of a tensor rank, so they are joined first.
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if whole.dim() == len(placement.shape):
        for split in tensor_splits(placement, mesh):
            whole = _join(whole, split, placement.shape, mesh)
    return whole


class WholeTensors:
    """The tensors of a model in parts; one rank can collect each of them whole. All ranks must create it.

    Args:
        joins: for each tensor of this rank's stages, by name, a function that returns it whole on every rank of the
            stage, in a collective of these ranks.
        like: tensors of the same shapes and types as the whole ones, on `meta`.
    """

    def __init__(
        self, joins: Mapping[str, Callable[[], Tensor]], like: Mapping[str, Tensor], mesh: ParallelMesh
    ) -> None:
        self._joins = joins
        self._mesh = mesh
        self._like = dict(like)
        self._holders = dict.fromkeys(like, mesh.rank)
        if mesh.size(PIPELINE_AXIS) > 1:
            described = {
                name: (mesh.rank, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
                for name, tensor in like.items()
            }
            for part in mesh.all_gather(described if mesh.is_first_replica else {}):
                for name, (holder, shape, dtype) in part.items():
                    self._holders[name] = holder
                    self._like[name] = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        self.shapes: dict[str, Sequence[int]] = {name: tuple(tensor.shape) for name, tensor in self._like.items()}
        """The shapes of all tensors of the model, by name."""

    def collect(self, name: str, rank: int) -> Tensor | None:
        """Return a whole tensor on the CPU of one rank, and None on the others; all ranks must call it."""
        whole = self._joins[name]() if name in self._joins else None
        if self._mesh.size(PIPELINE_AXIS) > 1:
            whole = self._mesh.send(whole, self._holders[name], rank, self._like[name])
        return whole.cpu() if whole is not None and self._mesh.rank == rank else None


def _join(part: Tensor, split: Split, shape: tuple[int, ...], mesh: ParallelMesh) -> Tensor:
    parts = [torch.empty_like(part) for _ in range(mesh.size(split.axis))]
    dist.all_gather(parts, part.contiguous(), group=mesh.group(split.axis))
    return join_parts(parts, split, shape[split.dim or 0])
