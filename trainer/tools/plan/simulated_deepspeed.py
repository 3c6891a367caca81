"""DeepSpeed on one simulated rank: its process group, its device, and the components of its tensors.

DeepSpeed keeps its process groups and its device in modules. A simulated rank has its own, and leaves none behind.
"""

from __future__ import annotations

import functools
import pkgutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from trainer.base.errors import UsageError
from trainer.base.extensions import resolved
from trainer.engine.engine import Engine
from trainer.ranks.environment import variables_restored
from trainer.recipe.plan import RunPlan
from trainer.recipe.strategies import Offload
from trainer.tools.plan.ledger import COMMUNICATION, GATHERED, GRADIENTS, MASTER, Ledger, on_host
from trainer.tools.plan.simulated_rank import replaced, within

_PACKAGE = "deepspeed"
_STAGES_1_2 = "deepspeed.runtime.zero.stage_1_and_2"
_STAGE_3 = "deepspeed.runtime.zero.stage3"
_PARTITIONING = "deepspeed.runtime.zero.partition_parameters"
_FETCHING = "deepspeed.runtime.zero.partitioned_param_coordinator"

_STATE: dict[str, dict[str, Any]] = {
    "deepspeed.comm.comm": {"cdb": None},
    "deepspeed.utils.groups": {
        "mpu": None, "mesh_device": None, "_WORLD_GROUP": None, "_ZERO_PARAM_INTRA_PARALLEL_GROUP": None,
    },
    f"{_PARTITIONING}.Init": {"num_persisted_parameters": 0, "num_persisted_elements": 0},
    # Ranks compare numbers that fake tensors do not have.
    _FETCHING: {"assert_ints_same_as_other_ranks": lambda _: None},
    "deepspeed.comm.torch": {"build_shm_op": lambda: None},
}  # fmt: skip
"""The state of DeepSpeed's modules before its first engine."""

_ANSWERS = {
    f"{_STAGES_1_2}.DeepSpeedZeroOptimizer": {"has_overflow": False},
    f"{_STAGE_3}.DeepSpeedZeroOptimizer_Stage3": {"has_overflow": False},
}
"""The answers of functions that read the values of gradients."""


def not_simulated(plan: RunPlan) -> UsageError:
    """Return the error for a strategy with an engine that the planner does not know."""
    return UsageError(
        f"`trainer plan` simulates the engines of trainer and DeepSpeed, but `parallel.strategy`"
        f" {plan.strategy.name} has another one; use another strategy, or measure a short run, which shows its memory"
    )


@contextmanager
def simulated_deepspeed(plan: RunPlan) -> Iterator[None]:
    """Give DeepSpeed the process group and the device of a simulated rank, for strategies that use it.

    Raises:
        UsageError: it is not installed, or the strategy uses another package.
    """
    if not plan.strategy.package:
        yield
        return
    if plan.strategy.package != _PACKAGE:
        raise not_simulated(plan)
    with ExitStack() as stack, variables_restored(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # which it checks to be aligned
        stack.enter_context(resolved(plan.strategy.ready)(0))
        from deepspeed.accelerator import real_accelerator
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        # The simulated device is a CPU, whatever this machine has.
        stack.enter_context(replaced(real_accelerator, ds_accelerator=CPU_Accelerator()))
        for path, values in _STATE.items():
            stack.enter_context(replaced(pkgutil.resolve_name(path), **values))
        for path, values in _ANSWERS.items():
            owner = pkgutil.resolve_name(path)
            answering = {name: _answering(getattr(owner, name), answer) for name, answer in values.items()}
            stack.enter_context(replaced(owner, **answering))
        yield


def _answering(method: Any, answer: Any) -> Any:
    """Return a function that does the work of `method`, its collectives too, and returns `answer`."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        # The work is still done, because its collectives and memory count.
        method(*args, **kwargs)
        return answer

    return call


_CREATORS = {
    f"{_STAGES_1_2}.DeepSpeedZeroOptimizer": {
        "setup_buckets": COMMUNICATION,
        "_build_compact_grad_partition_buffer": GRADIENTS,
        "get_flat_partition": GRADIENTS,
        "copy_grads_in_partition": GRADIENTS,
    },
    f"{_STAGE_3}.DeepSpeedZeroOptimizer_Stage3": {
        # Python puts the class before names of methods that begin with two underscores.
        "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads": COMMUNICATION
    },
    f"{_FETCHING}.PartitionedParameterCoordinator": {"_PartitionedParameterCoordinator__all_gather_params": GATHERED},
}
"""The component of tensors that methods of DeepSpeed make."""


@contextmanager
def labelled_deepspeed(ledger: Ledger, plan: RunPlan) -> Iterator[None]:
    """Count buffers that DeepSpeed makes during a step to their components, from their creation."""
    if not plan.strategy.package:
        yield
        return
    with ExitStack() as stack:
        for path, methods in _CREATORS.items():
            kind = pkgutil.resolve_name(path)
            creating = {
                name: within(partial(ledger.creating, component), getattr(kind, name))
                for name, component in methods.items()
            }
            stack.enter_context(replaced(kind, **creating))
        yield


def label_zero(ledger: Ledger, engine: Engine, offload: Offload) -> None:
    """Count tensors of DeepSpeed that stay between two steps to their components; `offload` is on the host."""
    zero = _of_deepspeed(engine)
    place = on_host if offload != "none" else str
    masters = [*_tensors(zero, "single_partition_of_fp32_groups"), *_tensors(zero, "fp32_partitioned_groups_flat")]
    ledger.assign(masters, place(MASTER))
    ledger.assign((flat.grad for flat in masters if flat.grad is not None), place(GRADIENTS))
    ledger.assign(_tensors(zero, "grad_partitions_flat_buffer"), place(GRADIENTS))
    ledger.assign(_tensors(zero, "accumulated_grads_in_cpu"), place(GRADIENTS))
    ledger.assign(_tensors(zero, "temp_grad_buffer_for_cpu_offload"), place(COMMUNICATION))
    ledger.assign(_tensors(zero, "param_buffer_of_bit16_for_cpu_offload_groups"), place(COMMUNICATION))
    ledger.assign(_tensors(zero, "temp_grad_buffer_for_gpu_offload"), COMMUNICATION)
    buffers = (bucket.buffer for bucket in zero.ipg_buckets.values())
    ledger.assign((tensor for found in buffers for tensor in _listed(found)), COMMUNICATION)


def group_of(engine: Engine) -> str:
    """Return the name of the group of DeepSpeed's data ranks, which may be its own copy of all ranks."""
    return str(_of_deepspeed(engine).dp_process_group.group_name)


def _of_deepspeed(engine: Any) -> Any:
    return engine._engine.optimizer


def _tensors(owner: Any, name: str) -> Iterable[Tensor]:
    return _listed(getattr(owner, name, None))


def _listed(found: Any) -> Iterable[Tensor]:
    if isinstance(found, dict):
        found = found.values()
    return [found] if isinstance(found, Tensor) else [t for t in found or () if isinstance(t, Tensor)]
