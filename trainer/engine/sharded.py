"""FSDP and HSDP: parameters, gradients and optimizer state sharded over the data ranks by torch's `fully_shard`.

Source: Zhao et al. 2023 (arXiv:2304.11277). FSDP is stage 3 of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054), or
stage 2 if parameters stay whole between forward and backward. HSDP shards within groups and replicates across them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from trainer.models.families.table import layers_of
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.placement import Placements, Split


def shard(
    model: nn.Module, placements: Placements, mesh: ParallelMesh, reshard_after_forward: bool, offload_parameters: bool
) -> Placements:
    """Shard each layer of the model's family, then the rest as one group, over the mesh axis `dp_shard`.

    Gradients are summed, never averaged: each rank's loss is already its share of the global mean.

    Args:
        model: the model on its device. Parts of tensor ranks are sharded further.
        placements: the placements of its parameters.
        mesh: the ranks.
        reshard_after_forward: whether to free gathered parameters between forward and backward.
        offload_parameters: whether to keep parameters, gradients and optimizer state in CPU memory.

    Returns:
        The placements of the sharded parameters.

    Raises:
        UsageError: the layers of the model are unknown, because its family is not in the table.
    """
    assert mesh.device_mesh is not None, "one process has nobody to share with"
    # Torch warns of in-place changes of views. Logits of tokens are a view, but are never changed in place here.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor", UserWarning)
    axes = ("dp_replicate", "dp_shard") if mesh.size("dp_replicate") > 1 else ("dp_shard",)
    policy = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if offload_parameters else OffloadPolicy()
    for layer in layers_of(model).values():
        fully_shard(
            layer, mesh=mesh.device_mesh[axes], reshard_after_forward=reshard_after_forward, offload_policy=policy
        )
    fully_shard(model, mesh=mesh.device_mesh[axes], reshard_after_forward=reshard_after_forward, offload_policy=policy)
    if hasattr(model, "generate"):  # it calls an encoder by itself, before the model's forward gathers the embedding
        register_fsdp_forward_method(model, "generate")
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
    """Sum gradients within the shard group only in this context; a backward pass after it sums across groups too.

    Each backward pass reduces to shards at once. Whole gradients kept over an accumulation would take the memory that
    sharding saves.
    """
    assert isinstance(model, FSDPModule)
    model.set_requires_all_reduce(False)
    try:
        yield
    finally:
        model.set_requires_all_reduce(True)
