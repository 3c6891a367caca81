"""FSDP and HSDP: parameters, gradients and optimizer state cut over the data-parallel ranks (torch's `fully_shard`).

Zhao et al. 2023 (arXiv:2304.11277). In the words of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054) this is stage 3,
and stage 2 where parameters stay whole between forward and backward. HSDP shards within groups and replicates across
them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainer.models.families.table import layers_of
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.placement import Placements, Split


def shard(
    model: nn.Module, placements: Placements, mesh: ParallelMesh, reshard_after_forward: bool, offload_parameters: bool
) -> Placements:
    """Shards each layer of the model's family, then the rest as one group, over the mesh axis `dp_shard`.

    Gradients are summed, never averaged: each rank's loss is already its share of the global mean.

    Args:
        model: on its device, perhaps cut over the tensor axis already: a part is then sharded further.
        placements: how its parameters lie.
        mesh: the ranks.
        reshard_after_forward: whether gathered parameters are freed between forward and backward.
        offload_parameters: whether all is kept in CPU memory.

    Returns:
        How the parameters lie now.

    Raises:
        UsageError: the model is in no family of the table.
    """
    assert mesh.device_mesh is not None, "one process has nobody to share with"
    # Logits of tokens are a view of their matrix product; nobody here changes them in place, of which torch warns.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor", UserWarning)
    axes = ("dp_replicate", "dp_shard") if mesh.size("dp_replicate") > 1 else ("dp_shard",)
    policy = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if offload_parameters else OffloadPolicy()
    for layer in layers_of(model).values():
        fully_shard(
            layer, mesh=mesh.device_mesh[axes], reshard_after_forward=reshard_after_forward, offload_policy=policy
        )
    fully_shard(model, mesh=mesh.device_mesh[axes], reshard_after_forward=reshard_after_forward, offload_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), "a parameter was left whole"
    return {
        name: replace(placement, splits=(*placement.splits, Split(dim=0, axis="dp_shard")))
        for name, placement in placements.items()
    }


@contextmanager
def defer_all_reduce(model: nn.Module) -> Iterator[None]:
    """Inside, a backward pass sums gradients within the shard group only; the last one sums them across groups too.

    Each backward pass reduces to shards at once: whole gradients kept over an accumulation would cost the memory that
    sharding saves.
    """
    assert isinstance(model, FSDPModule)
    model.set_requires_all_reduce(False)
    try:
        yield
    finally:
        model.set_requires_all_reduce(True)
