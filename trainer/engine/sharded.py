"""FSDP and HSDP: parameters, gradients and optimizer state sharded over the data ranks by torch's `fully_shard`.

Source: Zhao et al. 2023 (arXiv:2304.11277). FSDP is stage 3 of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054), or
stage 2 if parameters stay whole between forward and backward. HSDP shards within groups and replicates across them.

In bf16 and fp16, the weights of matrix products are gathered in 16 bits. Autocast rounds them to this type before each
product anyway, so the rounding before the gather changes no result. Norms and embeddings compute in fp32, and are
gathered in fp32. Gradients are summed in the type of `parallel.communication.gradients`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from trainer.engine.accumulation import AccumulationSchedule
from trainer.engine.forward import ModelForward, prepare_model
from trainer.engine.fsdp_internals import INTERNALS, filled, gather_rounded
from trainer.engine.native import NativeEngine, placements_of
from trainer.engine.precision import COMPUTE_DTYPES, PrecisionName, sent_dtype, weights_dtype
from trainer.engine.products import rounded_by_autocast
from trainer.engine.rounded_weights import learning, used_once
from trainer.models.families.table import SHARDING, layers_of
from trainer.models.merged_weights import is_fused
from trainer.models.names import move_buffers
from trainer.models.place import PlacedModel
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.placement import EXPERT_AXIS, SHARDS_AXIS, ParameterPlacement, Placements, Split
from trainer.recipe.plan import RunPlan
from trainer.tasks.task import Task


@dataclass(frozen=True)
class Sharding:
    precision: PrecisionName  # the type of matrix products, in which their weights are gathered
    reshard_after_forward: bool = True
    offloads: bool = False  # whether to keep parameters, gradients and optimizer state in CPU memory
    sent_in: torch.dtype | None = None  # the type in which gradients are sent; None: their own

    @property
    def reduced_in(self) -> torch.dtype | None:
        """The type in which gradients are summed over ranks; also of weights that are gathered in 16 bits."""
        return self.sent_in or (None if self.precision == "fp32" else torch.float32)


def shard(
    model: nn.Module, placements: Placements, mesh: ParallelMesh, how: Sharding, shards: dict[str, Tensor] | None = None
) -> Placements:
    """Shard each layer of the model's family, then the rest as one group, over the data ranks that shard.

    Modules with parameters that expert ranks divide are sharded apart, over the mesh axis `dp_shard`.

    Args:
        model: the model on its device, or on `meta` with `shards`. Parts of tensor ranks are sharded further.
        shards: this rank's rows of each parameter, by name, which are removed; None: those of the model's parameters.

    Returns:
        The placements of the sharded parameters.

    Raises:
        UsageError: the layers of the model are unknown, because its family is not in the table; or this version of
            torch lacks a member.
    """
    INTERNALS.require("`parallel.strategy` fsdp or hsdp", "use ddp")
    # Torch warns of in-place changes of views. Logits of tokens are a view, but are never changed in place here.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor", UserWarning)
    policy = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if how.offloads else OffloadPolicy()
    rounded = rounded_by_autocast(model) if how.precision != "fp32" else set()
    types = MixedPrecisionPolicy(reduce_dtype=how.reduced_in)
    # The layers first: the call for the model groups the parameters that no inner call has taken.
    layers = [*layers_of(model, SHARDING).values()]
    is_divided = any(EXPERT_AXIS in one.split_axes for one in placements.values())
    experts = [module for module in model.modules() if is_divided and is_fused(module)]
    for part in (*experts, *layers, model):
        fully_shard(
            part,
            mesh=mesh.sharding("dp_shard" if part in experts else SHARDS_AXIS),
            # The backward pass needs the last group at once, so it would be gathered again at the same moment.
            reshard_after_forward=how.reshard_after_forward and part is not model,
            mp_policy=types,
            offload_policy=policy,
        )
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), "a parameter was left whole"
    # Each gather begins before the products of the layer before, so that it is under way beside them also if the host
    # is late. The backward pass does so by itself.
    for part, following in pairwise([model, *layers]):
        assert isinstance(part, FSDPModule)
        assert isinstance(following, FSDPModule)
        inner = [module for module in following.modules() if module in experts]
        part.set_modules_to_forward_prefetch([following, *inner])  # type: ignore[list-item]  # `fully_shard` changed them
    if hasattr(model, "generate"):  # it calls an encoder by itself, before the model's forward gathers the embedding
        register_fsdp_forward_method(model, "generate")
    _sum_gradients(model)
    if shards is not None:
        _fill(model, shards, torch.device("cpu") if how.offloads else mesh.device)
    move_buffers(model, mesh.device)
    if rounded:
        gather_rounded(model, rounded, COMPUTE_DTYPES[how.precision])
    return {
        name: replace(placement, splits=(*placement.splits, Split(0, _shard_axis(placement, mesh))))
        for name, placement in placements.items()
    }


def _shard_axis(placement: ParameterPlacement, mesh: ParallelMesh) -> str:
    return SHARDS_AXIS if mesh.size(EXPERT_AXIS) > 1 and EXPERT_AXIS not in placement.split_axes else "dp_shard"


def _sum_gradients(model: nn.Module) -> None:
    """Let FSDP sum gradients: it averages by default, but each rank's loss is already its share of the global mean."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _fill(model: nn.Module, shards: dict[str, Tensor], device: torch.device) -> None:
    """Move the rows of `shards` to the sharded parameters of a model on `meta`, which then are on `device`."""
    copies: dict[nn.Parameter, nn.Parameter] = {}  # tied names share one
    state = {}
    for name, empty in model.named_parameters(remove_duplicate=False):
        if empty not in copies:
            assert isinstance(empty, DTensor)
            rows = shards[name].to(device, empty.dtype)
            assert rows.shape == empty.to_local().shape, f"{name} has {rows.shape[0]} rows"
            copies[empty] = filled(empty, rows)
        state[name] = copies[empty]
    # Assigned and not copied, so that tied names keep one parameter.
    model.load_state_dict(state, strict=False, assign=True)
    shards.clear()  # where rows are padded, the parameter has a copy


def _return_single_uses_together(loss: Tensor) -> None:
    """Return the gradients of weights that are stored in bf16 to fp32 with their group, if they have one use."""
    for node, _ in used_once(loss):
        weight = getattr(node, "variable", None)  # of the node of a leaf
        if weight is not None and weight.dtype == torch.bfloat16:
            weight.grad_dtype = None


@contextmanager
def defer_all_reduce(model: nn.Module) -> Iterator[None]:
    """Sum gradients within the shard group only in this context; a backward pass after it sums across groups too.

    Each backward pass reduces to shards at once. Whole gradients kept over an accumulation would take the memory that
    sharding saves.
    """
    assert isinstance(model, FSDPModule)
    # Only HSDP has this sum; FSDP over one axis ignores the setting.
    model.set_requires_all_reduce(False)
    try:
        yield
    finally:
        model.set_requires_all_reduce(True)


def shard_built(built: PlacedModel, mesh: ParallelMesh, plan: RunPlan) -> Placements:
    """Shard a built model as its recipe says, and return the placements of its parameters."""
    parallel = plan.recipe.parallel
    # Offloaded parameters stay on the host; those on `meta` have no values yet.
    if parallel.offload == "none" and built.shards is None:
        built.model.to(mesh.device)
    how = Sharding(
        plan.recipe.precision,
        parallel.reshard_after_forward,
        parallel.offload == "parameters",
        sent_dtype(parallel.communication),
    )
    return shard(built.model, placements_of(built, mesh), mesh, how, built.shards)


def build_sharded(built: PlacedModel, task: Task, mesh: ParallelMesh, plan: RunPlan, total_steps: int) -> NativeEngine:
    """Return the engine of `fsdp` and `hsdp`."""
    built = prepare_model(built, mesh, plan)
    placements = shard_built(built, mesh, plan)
    forward = ModelForward(built, task, mesh, plan)
    is_exact = weights_dtype(plan.recipe) == torch.float32
    loss_sum = forward.loss_sum if is_exact else learning(built.model, forward.loss_sum, _return_single_uses_together)
    schedule = AccumulationSchedule(loss_sum, partial(defer_all_reduce, built.model))
    return NativeEngine(forward, [built], schedule, placements, total_steps)
