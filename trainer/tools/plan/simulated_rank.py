"""One simulated rank of a mesh: collectives return at once, and tensors have shapes but no memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import _DEFAULT_FIRST_BUCKET_BYTES, _compute_bucket_assignment_by_size
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from trainer.base.errors import UsageError
from trainer.parallel.device_traits import DeviceTraits, planned_traits
from trainer.parallel.kernel_support import load
from trainer.parallel.mesh import ParallelMesh
from trainer.recipe.plan import RunPlan

_MISSING = object()
BUCKET_BYTES = 25 * 1024**2
"""The most bytes of a bucket of DDP by default, except of the first one; a larger parameter has its own."""


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Give attributes of a module, a class or an object of a library other values, where it offers no other way."""
    # By `vars`, because `getattr` would find inherited attributes, and the functions inside of static methods.
    before = {name: vars(owner).get(name, _MISSING) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            # It was inherited, so the new value is removed and not replaced.
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def within(context: Callable[[], AbstractContextManager[Any]], function: Any) -> Any:
    """Return a function, or a property, that does its work in a context."""
    if isinstance(function, property):
        return property(within(context, function.fget))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with context():
            return function(*args, **kwargs)

    return call


@contextmanager
def simulated_mesh(plan: RunPlan, rank: int) -> Iterator[ParallelMesh]:
    """Open the mesh of one rank of a plan without the other ranks; this process must not be a rank of its own."""
    assert not dist.is_initialized(), "a simulated rank needs a process without a process group"
    layout = plan.layout
    if layout.world_size > 1 or plan.strategy.cuts_anything:  # as a run
        # The fake backend answers each collective at once.
        dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
    try:
        yield ParallelMesh(torch.device("cpu"), **layout.sizes)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


_FP32_ON_CUDA = frozenset(
    {
        *(getattr(F, name) for name in ("softmax", "log_softmax", "layer_norm", "group_norm", "cross_entropy")),
        *(getattr(F, name) for name in ("nll_loss", "mse_loss", "softplus", "normalize")),
        *(getattr(torch, name) for name in ("softmax", "log_softmax", "exp", "pow", "rsqrt", "sum", "cumsum", "norm")),
        *(getattr(Tensor, name) for name in ("softmax", "log_softmax", "exp", "pow", "rsqrt", "sum", "cumsum", "norm")),
        Tensor.__pow__,
    }
)
"""The operations that autocast computes in fp32 on CUDA, and not on a CPU: those of torch's list that models call."""


class _AutocastOfCuda(TorchFunctionMode):
    """Autocast on a CPU with the list of CUDA."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _FP32_ON_CUDA and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(Tensor, _to_fp32, (args, kwargs))
        return function(*args, **(kwargs or {}))


@contextmanager
def _autocast_of_recomputation() -> Iterator[None]:
    """Enter the mode around modules that a backward pass runs again; autograd leaves it."""
    entered: list[ExitStack] = []

    def enter(*_: Any) -> None:
        # Inside of a backward pass: only a recomputation runs modules there.
        if torch._C._current_graph_task_id() != -1:
            entered.append(ExitStack())
            if len(entered) == 1:
                entered[-1].enter_context(_AutocastOfCuda())

    def leave(*_: Any) -> None:
        if entered:
            entered.pop().close()

    with ExitStack() as hooks:
        hooks.callback(register_module_forward_pre_hook(enter).remove)
        hooks.callback(register_module_forward_hook(leave, always_call=True).remove)
        yield


def _to_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


@contextmanager
def shapes_only(cuda: bool, fused: bool = True, autocast: bool = True) -> Iterator[None]:
    """Make every new tensor a fake one.

    With `cuda`, autocast has the types of CUDA, and with `fused` the project's kernels run, as on newer GPUs. Steps
    without `autocast` are simulated faster.

    Raises:
        UsageError: an operation needs the values of a tensor, or has no rule for shapes.
    """
    if cuda and fused:
        load()  # their formulas of FLOPs must be known before a counter starts
    with ExitStack() as stack:
        # DDP sends the new order of its buckets between ranks.
        stack.enter_context(replaced(DistributedDataParallel, _pre_forward=_pre_forward))
        stack.enter_context(replaced(dist, _compute_bucket_assignment_by_size=_last_buckets))
        # FSDP lists the shards of all ranks to take one; a thousand fake tensors for each parameter take minutes.
        stack.enter_context(replaced(_fsdp_param, _chunk_with_empty=_Chunks))
        # All tensors are on one device; and torch refuses to move the parameters of a module if they are fake.
        for kind in (nn.Module, PreTrainedModel):
            stack.enter_context(replaced(kind, to=lambda module, *_, **__: module))
        # The ranks of a part of a mesh are tensors with values.
        stack.enter_context(replaced(DeviceMesh, __getitem__=_part_of_mesh(DeviceMesh.__getitem__)))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        traits = DeviceTraits(not cuda, assumes_kernels=cuda and fused, captures_graphs=False, has_peers=False)
        stack.enter_context(planned_traits(traits))
        if cuda and autocast:
            stack.enter_context(_AutocastOfCuda())
            stack.enter_context(_autocast_of_recomputation())
        try:
            yield
        except _NEEDS_VALUES as error:
            raise UsageError(
                f"the recipe cannot be planned: its operation {error.func} needs the values of tensors, but a plan has"
                " only their shapes; measure some steps with `trainer run`"
            ) from error


class _Chunks:
    """The chunks of `torch.chunk`, then empty ones, each made when it is taken."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor = tensor
        self._dim = dim
        self._length = -(-tensor.shape[dim] // num_chunks)

    def __getitem__(self, index: int) -> Tensor:
        start, end = index * self._length, self._tensor.shape[self._dim]
        if index and start >= end:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._length, end - start))


def _part_of_mesh(part: Callable[..., DeviceMesh]) -> Callable[..., DeviceMesh]:
    def outside(mesh: DeviceMesh, names: Any) -> DeviceMesh:
        # Real tensors: ranks are read from them.
        with _disable_current_modes():
            return part(mesh, names)

    return outside


def _last_buckets(tensors: list[Tensor], _: Sequence[int], is_sparse: list[bool]) -> tuple[list[list[int]], list[int]]:
    """Return the buckets that DDP has after its first step, in which the last parameters get gradients first.

    It has one bucket before, and orders all by the gradients of the first step. Buckets and limits are from last to
    first, as DDP expects them.
    """
    limits = [_DEFAULT_FIRST_BUCKET_BYTES, BUCKET_BYTES]
    buckets, sizes = _compute_bucket_assignment_by_size(tensors[::-1], limits, is_sparse[::-1])
    last = len(tensors) - 1
    return [[last - index for index in bucket] for bucket in buckets[::-1]], sizes[::-1]


def _pre_forward(wrapped: Any, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
    # As in DDP, but without the collective in which ranks agree on the order of buckets.
    if torch.is_grad_enabled() and wrapped.require_backward_grad_sync:
        wrapped.reducer.prepare_for_forward()
    return inputs, kwargs
