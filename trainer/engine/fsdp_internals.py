"""The private members of torch's `fully_shard` that this project uses, to gather each parameter in a type of its own.

The public `MixedPrecisionPolicy` has one type for all parameters of a module, norms included, and adds the gradients
of several passes in this type. It also has no way to fill a sharded parameter with rows that stay on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from trainer.base.internals import Internals
from trainer.engine.rounded_weights import in_fp32

_PARAMETER = "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam"

INTERNALS = Internals(
    "torch",
    "2.11 to 2.13",
    {
        "torch.distributed.tensor:DTensor": ["_spec"],  # the layout of a parameter, for rows on another device
        # From a module to its parameters.
        "torch.distributed.fsdp:FSDPModule": ["_get_fsdp_state"],
        "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState": ["_fsdp_param_group"],
        "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup": [
            "fsdp_params",
            "post_backward",  # replaced: it returns gradients to fp32 first
        ],
        _PARAMETER: [
            "sharded_param",
            "init_dtype_attrs",  # replaced: it sets the next two
            "param_dtype",  # the type of the gather; None: that of the parameter
            "orig_dtype",  # the type of the sharded gradient
            "init_unsharded_param",  # replaced once: it gives the gathered parameter a type of gradients
            "_unsharded_param",
            "unsharded_accumulated_grad",  # the sum of earlier passes, which torch reduces in place of the gradient
        ],
    },
)


def filled(empty: DTensor, rows: Tensor) -> nn.Parameter:
    """Return a parameter with the layout of `empty` and these rows, which stay on their device.

    `DTensor.from_local` would move offloaded rows to the device of the mesh.
    """
    whole = DTensor(rows, empty._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return nn.Parameter(whole, empty.requires_grad)


def gather_rounded(model: nn.Module, names: set[str], dtype: torch.dtype) -> None:
    """Gather parameters of a sharded model in `dtype`; gradients of several passes are added in fp32."""
    chosen = {parameter for name, parameter in model.named_parameters() if name in names}
    for module in model.modules():
        group: Any = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        if group is None:
            continue
        group.post_backward = partial(_reduced_in_fp32, group.fsdp_params, group.post_backward)
        for parameter in group.fsdp_params:
            if parameter.sharded_param in chosen:
                parameter.sharded_param.grad_dtype = torch.float32
                parameter.init_dtype_attrs = partial(_gathered_in, dtype, parameter, parameter.init_dtype_attrs)
                if dtype == torch.float16 or parameter.sharded_param.dtype != torch.float32:
                    gather = partial(_gathered_for_fp32, parameter, parameter.init_unsharded_param)
                    parameter.init_unsharded_param = gather


def _gathered_in(
    dtype: torch.dtype, parameter: Any, set_types: Callable[[MixedPrecisionPolicy], None], policy: MixedPrecisionPolicy
) -> None:
    set_types(policy)
    # Torch copies each shard that it gathers in another type; None: its own.
    parameter.param_dtype = None if parameter.sharded_param.dtype == dtype else dtype
    parameter.orig_dtype = torch.float32  # the type of the sharded gradient, also of a weight that is stored in bf16


def _gathered_for_fp32(parameter: Any, gather: Callable[[], None]) -> None:
    """Add the gradients of all uses of a weight in 16 bits in fp32, as on one process."""
    gather()
    parameter._unsharded_param.grad_dtype = torch.float32
    # The method of the class again: torch makes the gathered parameter in its first call, and keeps it.
    del parameter.init_unsharded_param


def _reduced_in_fp32(parameters: Sequence[Any], reduce: Callable[[], None], *_: Any) -> None:
    """Return the gradients of a group to fp32, the one type that torch reduces, and reduce them."""
    _return_to_fp32(parameters)
    reduce()


@torch.no_grad()
def _return_to_fp32(parameters: Sequence[Any]) -> None:
    """Return the gradients of gathered parameters to fp32 at once; torch adds those of later passes to them."""
    gathered = [p for p in parameters if hasattr(p, "_unsharded_param") and p.unsharded_accumulated_grad is None]
    waiting = [p for p in gathered if p._unsharded_param.grad is not None]
    for p, gradient in zip(waiting, in_fp32([p._unsharded_param.grad for p in waiting]), strict=True):
        p._unsharded_param.grad, p.unsharded_accumulated_grad = None, gradient
