"""The private members of DeepSpeed's ZeRO that this project reads or replaces.

DeepSpeed's public interface moves a whole model to the device, gathers updated parameters in one type, and links
moments to the first group of parameters only.
"""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch
from torch import Tensor, nn

from trainer.base.internals import Internals
from trainer.models.checkpointing import not_recorded
from trainer.models.names import aliases, replace_in
from trainer.models.place import PlacedModel, ShardChoice
from trainer.parallel.mesh import ParallelMesh, backend

_ZERO = "deepspeed.runtime.zero"
_GATHERED_IN = "comm_dtype"
"""The attribute of a parameter with the type in which it is gathered; stage 3 of DeepSpeed reads it too."""

INTERNALS = Internals(
    "deepspeed",
    "0.19.8",
    {
        "deepspeed.ops": ["__compatible_ops__"],  # changed by `package.py`: one would be compiled
        "deepspeed.runtime.utils": ["model_parallel"],  # an attribute of parameters, which the norm reads
        "deepspeed.runtime.torch_autocast": ["get_comm_dtype"],  # reads `_GATHERED_IN`
        "deepspeed.utils.nvtx": ["enable_nvtx"],  # set by `package.py`
        "deepspeed.utils": ["lazy_init_hp_params_optimizer_state"],  # links moments to parameters
        "deepspeed.utils.mixed_precision_linkage": ["_hp_mapping"],  # from a parameter to its part of the flat weights
        "deepspeed.utils.tensor_fragment:tensor_fragment": ["get_hp_fragment", "lp_fragment_address"],
        f"{_ZERO}.stage_1_and_2": ["empty_cache", "all_gather_dp_groups", "is_invalid_grad_norm"],  # replaced
        f"{_ZERO}.stage3": ["is_invalid_grad_norm"],  # replaced: it reads the norm
        f"{_ZERO}.stage_1_and_2:DeepSpeedZeroOptimizer": [
            "flatten_dense_tensors_aligned",  # replaced: it frees each parameter at once
            "scaled_global_norm",  # replaced for a step that is skipped
            "override_loss_scale",
            "update_lp_params",  # gathers the parameters
            "bit16_groups",
            "single_partition_of_fp32_groups",  # the flat weights of this rank
            "averaged_gradients",
        ],
        f"{_ZERO}.stage3:DeepSpeedZeroOptimizer_Stage3": [
            "_get_norm_groups",  # replaced for a step that is skipped
            "override_loss_scale",
            "fp32_partitioned_groups_flat",  # the flat weights of this rank
            "averaged_gradients",
            "parameter_offload",
        ],
        f"{_ZERO}.parameter_offload:DeepSpeedZeRoOffload": [  # replaced: selective recomputation would record them
            "pre_sub_module_forward_function",
            "post_sub_module_forward_function",
        ],
        f"{_ZERO}.partition_parameters:Init": [
            "local_device",
            "_convert_to_deepspeed_param",
            "partition",
            # The attributes of a parameter of stage 3: its part, and the whole's numbers.
            "ds_tensor",
            "ds_numel",
            "ds_shape",
        ],
    },
)


def partition(built: PlacedModel, mesh: ParallelMesh, config: dict[str, Any], deepspeed: Any) -> None:
    """Partition the parameters, one at a time. DeepSpeed's own way moves the whole model to the device first.

    The parameters are whole, or on `meta` with this rank's rows in `built.shards`.
    """
    choice = ShardChoice(mesh.index("dp_shard"), mesh.size("dp_shard"), flat=True)
    with redirect_stdout(io.StringIO()):
        deepspeed.init_distributed(backend(mesh.device), verbose=False, dist_init_required=False)
        # An empty module, because `Init` partitions all parameters of a module that it gets.
        zero = deepspeed.zero.Init(module=nn.Module(), config_dict_or_path=config)
        # By parameter and not by name: a tied one is partitioned once.
        for own, names in aliases(built.model).items():
            parameter: Any = own
            if built.shards is None:
                parameter.data = own.data.to(zero.local_device)
            else:
                rows = built.shards[names[0]]
                whole = torch.empty(own.shape)  # pages that are not written take no memory
                (whole[slice(*choice.bounds(own.shape))] if own.dim() else whole).copy_(rows)
                parameter = nn.Parameter(whole.to(zero.local_device), requires_grad=own.requires_grad)
                for name in names:
                    replace_in(built.model, name, parameter)
                    del built.shards[name]
            zero._convert_to_deepspeed_param(parameter)
            parameter.partition()


def shape_of(parameter: Any, unpartitioned: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a parameter before its partition; `unpartitioned` for one that is not partitioned."""
    return tuple(getattr(parameter, "ds_shape", unpartitioned))


def bounds(parameter: Any, index: int) -> tuple[int, int]:
    """Return the start of the part of a parameter of stage 3 on a data rank, and the number of its elements."""
    size = parameter.ds_tensor.ds_numel  # with padding
    # The last ranks may have padding only, and so no elements.
    start = size * index
    return start, min(size, max(0, parameter.ds_numel - start))


@contextmanager
def flattened_in_place() -> Iterator[None]:
    """Let stages 1 and 2 free each parameter once it is in the flat buffer; DeepSpeed frees them after all are."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero import stage_1_and_2

    optimizer, empty_cache = stage_1_and_2.DeepSpeedZeroOptimizer, stage_1_and_2.empty_cache
    flatten = optimizer.flatten_dense_tensors_aligned
    optimizer.flatten_dense_tensors_aligned = _flatten_one_by_one
    stage_1_and_2.empty_cache = get_accelerator().empty_cache  # DeepSpeed's function resets the peak of the memory too
    try:
        yield
    finally:
        optimizer.flatten_dense_tensors_aligned, stage_1_and_2.empty_cache = flatten, empty_cache


def _flatten_one_by_one(
    zero: Any,
    tensors: Sequence[Any],
    alignment: int,
    use_cpu_data: bool = False,
    param_padding: Sequence[int] | None = None,
) -> Tensor:
    attribute = "cpu_data" if use_cpu_data else "data"
    own: list[Tensor] = [getattr(tensor, attribute) for tensor in tensors]
    paddings = param_padding or [0] * len(own)
    size = sum(one.numel() for one in own) + sum(paddings)
    flat = own[0].new_empty(size + -size % alignment)  # a page takes memory when it is written
    start = 0
    for tensor, padding in zip(tensors, paddings, strict=True):
        # The list has the last reference, so the memory is free once the copy is made.
        one = own.pop(0)
        flat[start : start + one.numel()] = one.reshape(-1)
        start += one.numel()
        flat[start : start + padding] = 0
        start += padding
        setattr(tensor, attribute, one.new_empty(0))
    # The alignment is zero as in DeepSpeed's own buffer.
    flat[start:] = 0
    return flat


def gather_in(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    setattr(parameter, _GATHERED_IN, dtype)


def is_gathered_rounded(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, _GATHERED_IN)


@contextmanager
def unrounded(parameter: Tensor) -> Iterator[None]:
    """Gather a parameter of stage 3 in its own type inside of this context."""
    dtype = parameter.__dict__.pop(_GATHERED_IN, None)
    yield
    if dtype is not None:
        setattr(parameter, _GATHERED_IN, dtype)


@contextmanager
def updates_gathered_rounded(zero: Any) -> Iterator[None]:
    """Gather updated parameters of stages 1 and 2 in their types inside of this context; DeepSpeed has one type.

    Each group of the optimizer has one type. The rank rounds its own part too, so that all ranks hold the same bits.
    gloo copies all that it gathers, so it gets `allgather_bucket_size` elements at a time, as DeepSpeed without this
    collective.
    """
    from deepspeed.runtime.zero import stage_1_and_2

    gather = stage_1_and_2.all_gather_dp_groups

    def gather_rounded(
        groups_flat: Sequence[Tensor],
        partitioned_param_groups: Sequence[Sequence[Tensor]],
        dp_process_group: Sequence[Any],
        **options: Any,
    ) -> None:
        for parameters, flat, parts, group in zip(
            zero.bit16_groups, groups_flat, partitioned_param_groups, dp_process_group, strict=True
        ):
            sent, index = flat, torch.distributed.get_rank(group)
            if dtype := getattr(parameters[0], _GATHERED_IN, None):
                sent = torch.empty_like(flat, dtype=dtype)
                own, parts = parts[index], sent.chunk(len(parts))
                parts[index].copy_(own)
            # The limit is one of elements that arrive from all ranks, so each rank sends its share of them.
            bucket = max(1, options["allgather_bucket_size"] // len(parts))
            if bucket >= len(parts[0]) or torch.distributed.get_backend(group) != "gloo":
                gather([sent], [parts], [group], **options)
            else:
                for pieces in zip(*(torch.split(part, bucket) for part in parts), strict=True):
                    torch.distributed.all_gather(list(pieces), pieces[index], group)
            if sent is not flat:
                flat.copy_(sent)

    stage_1_and_2.all_gather_dp_groups = gather_rounded
    try:
        yield
    finally:
        stage_1_and_2.all_gather_dp_groups = gather


@contextmanager
def numbers_read_once(zero: Any, loss: Callable[[], Tensor]) -> Iterator[list[float]]:
    """Let DeepSpeed read its gradient norm together with the loss in this context, so that the host waits once.

    DeepSpeed reads the norm before the update, and skips a step with a non-finite one.

    Args:
        loss: returns the loss, a scalar.

    Yields:
        A list, which has the loss and the scaled norm after the step.
    """
    module: Any = sys.modules[type(zero).__module__]
    is_invalid, found = module.is_invalid_grad_norm, list[float]()

    def read(norm: Any) -> bool:
        if not found:  # stages 1 and 2 ask for each parameter group again
            of_loss = loss().double()
            # One copy to the host; a norm of offloaded gradients is there already.
            numbers = torch.stack([of_loss, torch.as_tensor(norm, device=of_loss.device).double()]).cpu()
            found.extend([numbers[0].item(), numbers[1].item()])
        return not math.isfinite(found[1]) or found[1] < 0.0

    module.is_invalid_grad_norm = read
    try:
        yield found
    finally:
        module.is_invalid_grad_norm = is_invalid


@contextmanager
def infinite_norm(zero: Any) -> Iterator[None]:
    """Let DeepSpeed find an infinite gradient norm inside of this context, so that it skips the step."""
    norm = torch.full((), torch.inf, device=zero.device)
    zero.scaled_global_norm = lambda: norm  # stages 1 and 2
    zero._get_norm_groups = lambda: [norm]  # stage 3
    try:
        yield
    finally:
        # Attributes of the object hid the methods of its class, which are visible again.
        del zero.scaled_global_norm, zero._get_norm_groups


def flat_weights(zero: Any, is_partitioned: bool) -> list[Tensor]:
    """Return this rank's flat part of the weights of each parameter group, in fp32."""
    flats: list[Tensor] = zero.fp32_partitioned_groups_flat if is_partitioned else zero.single_partition_of_fp32_groups
    return flats


def averaged_gradients(zero: Any) -> list[Tensor]:
    """Return this rank's gradients before the step, unless they are offloaded."""
    return [gradient for group in zero.averaged_gradients.values() for gradient in group]


def fragment(parameter: Any, key: str | None) -> tuple[Tensor, int]:
    """Return this rank's elements of a weight (key None) or a moment in stages 1 and 2, and their start."""
    mapping = parameter._hp_mapping
    if mapping is None:  # other ranks have all elements
        return torch.empty(0), 0
    return mapping.get_hp_fragment(key).detach(), mapping.lp_fragment_address.start


def link_moments(zero: Any, state: Any) -> None:
    """Link each parameter of stages 1 and 2 to its moments in the flat parts.

    DeepSpeed links the first parameter group only, after the first step.
    """
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    for parameters, flat in zip(zero.bit16_groups, flat_weights(zero, is_partitioned=False), strict=True):
        lazy_init_hp_params_optimizer_state(parameters, flat, state)


def count_on_this_rank(parameter: Any, is_counted: bool) -> None:
    """Let DeepSpeed's norm add the gradient of this rank, beside those of the other tensor and context ranks.

    Otherwise it adds that of the first of them.
    """
    parameter.model_parallel = is_counted


def leave_gathers_unrecorded(zero: Any) -> None:
    """Hide the gathers of stage 3 from selective recomputation."""
    gathering = zero.parameter_offload
    for name in ("pre_sub_module_forward_function", "post_sub_module_forward_function"):
        setattr(gathering, name, not_recorded(getattr(gathering, name)))
