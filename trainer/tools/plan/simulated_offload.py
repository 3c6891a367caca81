"""Copies between host and device, which a simulated rank has on one device."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trainer.recipe.plan import RunPlan
from trainer.tools.plan.ledger import GATHERED, GRADIENTS, Ledger, on_host
from trainer.tools.plan.simulated_rank import replaced, within

_SHARDING = "torch.distributed.fsdp._fully_shard"
_TO_DEVICE = {
    "native": {f"{_SHARDING}._fsdp_param.FSDPParam": "all_gather_inputs"},
    "deepspeed": {
        "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator": (
            "_PartitionedParameterCoordinator__all_gather_params"
        ),
        "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": "partition_grads",
    },
}
_TO_HOST = {"native": {f"{_SHARDING}._fsdp_param_group": "foreach_reduce"}, "deepspeed": {}}
"""The functions in which parameters move to the device, and sharded gradients to the host."""


class _Copies(TorchFunctionMode):
    """Copies a tensor where it would move to the device, or to the host."""

    def __init__(self, ledger: Ledger, to_host: bool) -> None:
        super().__init__()
        self._ledger = ledger
        self._to_host = to_host

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        places = (*args[1:], *kwargs.values())
        moves = function is Tensor.to and any(isinstance(place, torch.device | str) for place in places)
        if moves and self._ledger.is_on_host(args[0]) != self._to_host:
            with self._ledger.creating(on_host(GRADIENTS) if self._to_host else GATHERED):
                # A move on one device returns the same tensor; a copy takes the memory that a real move takes.
                args = (args[0].clone(), *args[1:])
            self._ledger.totals.moved += args[0].nbytes
        return function(*args, **kwargs)


@contextmanager
def copies_between_host_and_device(ledger: Ledger, plan: RunPlan) -> Iterator[None]:
    """Count copies of tensors that move from the host to the device, and of gradients that move back."""
    kind = plan.strategy.package or "native"
    with ExitStack() as stack:
        for table, to_host in ((_TO_DEVICE, False), (_TO_HOST, True)):
            for path, name in table[kind].items():
                owner = pkgutil.resolve_name(path)
                # Autograd's passes drop an outer mode, so that each function enters one.
                copying = within(partial(_Copies, ledger, to_host), getattr(owner, name))
                stack.enter_context(replaced(owner, **{name: copying}))
        yield
