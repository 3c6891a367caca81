"""The ledger of a training step: bytes alive by component, collectives by axis, and operations.

It sees every operation below autograd. Tensors may be real or fake (`torch._subclasses.FakeTensorMode`): it reads
shapes and types only. Memory inside of a kernel, such as a workspace, is not visible to it.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves

from trainer.tools.plan.work import (
    BACKWARD,
    FORWARD,
    HOST_WAIT,
    NOTHING,
    OPTIMIZER_STEP,
    RECOMPUTED,
    VIEW,
    Amount,
    Kind,
    plus,
    sum_of,
    work_of,
)

PARAMETERS, BUFFERS, GRADIENTS, OPTIMIZER = "parameters", "buffers", "gradients", "optimizer state"
MASTER, GATHERED, CASTS = "master copies", "gathered layers", "weights in low precision"
COMMUNICATION, SECOND_MODEL = "communication buffers", "second model"
ACTIVATIONS, LOSS, TEMPORARY, BATCH = "activations", "logits and loss", "temporary", "batch"
POINT_TO_POINT = frozenset(("send", "recv_", "recv_any_source_"))
_MODULE = "planned_module"
_ON_HOST = " on the host"
COMPONENTS = (
    PARAMETERS, SECOND_MODEL, MASTER, BUFFERS, GRADIENTS, OPTIMIZER, GATHERED, CASTS, COMMUNICATION, ACTIVATIONS, LOSS,
    TEMPORARY, BATCH,
)  # fmt: skip


@dataclass(frozen=True)
class Collective:
    """One kind of collective: its operation, its group, and the module in which it runs."""

    operation: str  # the name of torch's operation, such as `allreduce_`
    group: str  # the name of the process group
    module: str  # the name of the innermost module; empty outside of the model
    phase: str  # the phase of the step, one of `trainer.tools.plan.work.PHASES`


class Traffic(NamedTuple):
    """The calls of a collective and the bytes of their largest tensors: one rank's input or output, whole."""

    calls: int
    num_bytes: int


class Place(NamedTuple):
    """A part of a step."""

    module: str  # the name of the innermost module; empty outside of the model
    backward: bool  # whether it is in a backward pass
    update: bool = False  # whether it is outside of the model, and after a backward pass or without recording for one


class Peak(NamedTuple):
    """The moment with the most bytes alive at a place: their number, and their number by component."""

    num_bytes: int
    by_component: Mapping[str, int]
    place: Place


@dataclass
class Totals:
    """The collectives and the work of one period, and the bytes that move between host and device."""

    traffic: dict[Collective, Traffic] = field(default_factory=dict)
    work: dict[Kind, Amount] = field(default_factory=dict)
    moved: int = 0
    # the part of the work that a backward pass computes between the begin of a collective and the wait for it
    behind: dict[tuple[Collective, Kind], Amount] = field(default_factory=dict)

    @property
    def flops(self) -> Counter[torch.dtype]:
        """The floating-point operations of matrix products and attention, by type."""
        found: Counter[torch.dtype] = Counter()
        for kind, amount in self.work.items():
            if kind.dtype is not None and amount.flops:
                found[kind.dtype] += amount.flops
        return found

    @property
    def model_flops(self) -> int:
        """Those of the model alone, without recomputation and without those of the optimizer."""
        return sum(amount.model_flops for amount in self.work.values())

    def of_microbatches(self, axes: Mapping[str, str]) -> Totals:
        """Return the part that each microbatch repeats: all work but the optimizer's, and traffic of the model.

        Args:
            axes: the axis of each process group. Sums over data ranks are those of gradients, once in a step.
        """

        def sums_gradients(key: Collective) -> bool:
            return key.operation == "allreduce_" and axes.get(key.group, "").startswith("dp")

        traffic = {
            key: traffic
            for key, traffic in self.traffic.items()
            if key.operation in POINT_TO_POINT
            or (key.module and key.phase != OPTIMIZER_STEP and not sums_gradients(key))
        }
        work = {kind: amount for kind, amount in self.work.items() if kind.phase != OPTIMIZER_STEP}
        return Totals(traffic, work, self.moved, self.behind)

    def plus(self, other: Totals, times: int = 1) -> Totals:
        """Return the sum of these totals and `times` the others, which may be negative."""
        moved = self.moved + times * other.moved
        traffic, work = sum_of(self.traffic, other.traffic, times), sum_of(self.work, other.work, times)
        return Totals(traffic, work, moved, sum_of(self.behind, other.behind, times))


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts every tensor while it is the active mode.

    A tensor of several views counts once, by its storage. A subclass that wraps tensors, such as a `DTensor`, counts
    as the wrapped tensor.

    Args:
        answers: whether to answer operations that read values, for tensors that have none.
        splits: whether results of operations on the host's tensors are on the host too.
    """

    def __init__(self, answers: bool = False, splits: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answers = answers
        self._splits = splits
        self._component: dict[int, str] = {}  # by storage
        self._bytes: dict[int, int] = {}
        # Reentrant, because a finalizer may run while the same thread holds the lock in `_set_size`.
        self._lock = threading.RLock()  # threads of gloo end tensors too
        self._alive: Counter[str] = Counter()
        self._names: dict[nn.Module, str] = {}
        self._inside: list[str] = []  # the modules in a forward pass, innermost last
        self._behind = ""  # the module in a backward pass
        self._has_passed = False  # whether the last pass was a backward pass
        self._copies_gradients = False  # whether the next copy is of gradients that FSDP does not send
        # a collective that is not waited for at once, with its node of autograd and the next one
        self._message: tuple[Collective, list[Any]] | None = None
        self._hooks = ExitStack()
        self._now = 0
        self._now_on_host = 0
        self._default: str | None = None
        self.totals = Totals()
        self.peaks: dict[Place, Peak] = {}
        self.most_gradients = 0
        self.held: Mapping[str, int] = {}  # alive at the begin of the first backward pass
        self.most_on_host: Mapping[str, int] = {}

    def __enter__(self) -> Ledger:
        self._hooks.callback(register_module_forward_pre_hook(self._enter_module).remove)
        # Recomputation leaves modules by an exception once it has all that the backward pass needs.
        self._hooks.callback(register_module_forward_hook(self._leave_module, always_call=True).remove)
        self._resize, self._cpu = torch.UntypedStorage.resize_, Tensor.cpu
        ledger = self

        # In a plan, all tensors are on one device, so a copy to the host is no operation.
        def to_host(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            ledger._note_wait()
            with torch._C.DisableTorchFunction():  # a mode for functions would look this one up again
                return ledger._cpu(tensor, *args, **kwargs)

        # `resize_` is a method of storages, below the dispatcher, so the mode does not see it.
        def resize(storage: torch.UntypedStorage, size: int) -> Any:  # FSDP frees gathered layers like this
            result = ledger._resize(storage, size)
            ledger._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        Tensor.cpu = to_host  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *reason: Any) -> None:
        super().__exit__(*reason)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        Tensor.cpu = self._cpu  # type: ignore[method-assign]
        self._hooks.close()

    @property
    def alive(self) -> Mapping[str, int]:
        """The bytes alive on the device, by component."""
        return {name: count for name, count in self._alive.items() if count and not name.endswith(_ON_HOST)}

    @property
    def alive_on_host(self) -> Mapping[str, int]:
        """The bytes alive on the host, by component."""
        return {
            name.removesuffix(_ON_HOST): count
            for name, count in self._alive.items()
            if count and name.endswith(_ON_HOST)
        }

    @property
    def peak(self) -> Peak:
        """The moment of this period with the most bytes alive."""
        return max(self.peaks.values(), key=lambda peak: peak.num_bytes)

    def restart(self) -> None:
        """Begin a new period: forget its peaks, and count collectives and operations from zero."""
        self.restart_totals()
        self.held, self.most_gradients, self._has_passed = {}, 0, False
        self.peaks.clear()
        self._note_peak()
        self.most_on_host = self.alive_on_host

    def restart_totals(self) -> Totals:
        """Count collectives and operations from zero, and return the totals so far."""
        before, self.totals = self.totals, Totals()
        return before

    @contextmanager
    def creating(self, component: str) -> Iterator[None]:
        """Count tensors that are made in this context to `component`."""
        before, self._default = self._default, component
        try:
            yield
        finally:
            self._default = before

    def assign(self, tensors: Iterable[Tensor], component: str) -> None:
        """Count existing tensors to `component`."""
        for tensor in tensors:
            for storage in _storages(tensor):
                self._assign(storage, component)

    def _assign(self, storage: torch.UntypedStorage, component: str) -> None:
        key = storage._cdata
        self._add(storage, component)
        if self._component[key] != component:
            size = self._bytes[key]
            # By way of 0: the old component gives the bytes back before the new one counts them.
            self._set_size(key, 0)
            self._component[key] = component
            self._set_size(key, size)

    def _add(self, storage: torch.UntypedStorage, component: str) -> None:
        key = storage._cdata
        if key in self._bytes:
            return
        self._bytes[key], self._component[key] = 0, component
        # Torch keeps one Python object of a storage while its memory lives, so the end of both is one.
        weakref.finalize(storage, self._forget, key)  # `key` is an address, which the next storage may get
        self._set_size(key, storage.nbytes())

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._bytes:
            self._set_size(storage._cdata, storage.nbytes())
        else:
            self._add(storage, GATHERED)

    def _set_size(self, key: int, size: int) -> None:
        with self._lock:
            change, component = size - self._bytes[key], self._component[key]
            self._bytes[key] = size
            self._alive[component] += change
            # The host has a peak of its own.
            if component.endswith(_ON_HOST):
                self._now_on_host += change
                if self._now_on_host > sum(self.most_on_host.values()):
                    self.most_on_host = self.alive_on_host
                return
            if component == GRADIENTS:
                self.most_gradients = max(self.most_gradients, self._alive[GRADIENTS])
            self._now += change
            # A peak can only come after growth.
            if change > 0:
                self._note_peak()

    def _note_peak(self) -> None:
        backward = _in_backward()
        is_after = self._has_passed or self._phase() == OPTIMIZER_STEP
        place = Place(self._module(backward), backward, is_after and not backward)
        before = self.peaks.get(place)
        if before is None or self._now > before.num_bytes:
            self.peaks[place] = Peak(self._now, self.alive, place)

    def _forget(self, key: int) -> None:
        with self._lock:
            self._set_size(key, 0)
            del self._bytes[key], self._component[key]

    def name_modules(self, names: Mapping[nn.Module, str]) -> None:
        """Give modules their names in peaks and collectives."""
        self._names |= names

    def follow_gradients(self, model: nn.Module) -> None:
        """Count the gradients of a model's parameters from the moment when they are summed."""
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda summed: self.assign([summed.grad] if summed.grad is not None else [], GRADIENTS)
                )

    def _module(self, backward: bool) -> str:
        return self._inside[-1] if self._inside else self._behind if backward else ""

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        self._has_passed = False
        # A module without a name counts as its outer one.
        self._inside.append(self._names.get(module, self._module(_in_backward())))

    def _leave_module(self, module: nn.Module, _: Any, output: Any) -> None:
        name = self._inside.pop()
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                cast(dict[str, str], tensor.grad_fn.metadata)[_MODULE] = name  # its backward pass begins here

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.ops.prim.device.default:  # autocast asks for it several times for each operation
            return args[0].fake_device if isinstance(args[0], FakeTensor) else function(*args, **kwargs)
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # it comes back with the tensors that it wraps
        if self._answers and function in _ANSWERS:
            # Outside of passes and updates, an engine reads its batch, which is on the host, and results.
            if self._inside or self._phase() != FORWARD:
                self._note_wait()
            return _ANSWERS[function](*args)
        self._follow_pass()
        result = function(*args, **kwargs)
        inputs, outputs = _tensors((args, kwargs)), _tensors(result)
        component = self._component_of(function, inputs, outputs)
        if self._splits and self._default is None and any(map(self.is_on_host, inputs)):
            component = on_host(TEMPORARY)
        for tensor in outputs:
            self._add(tensor.untyped_storage(), component)
        self._follow_copies(function, args, inputs)
        if function.namespace == "c10d":
            self._count_collective(function, args, inputs)
        elif function.namespace != "profiler":  # marks for profilers; the first optimizer of a class adds more of them
            kind, amount = work_of(self._phase(), function, args, kwargs, inputs, outputs, result)
            self._add_work(kind, amount)
            self._count_behind(kind, amount)
        return result

    def _note_wait(self) -> None:
        self._add_work(Kind(self._phase(), VIEW, HOST_WAIT, None, 0, 0), Amount(1, 0, 0))

    def _add_work(self, kind: Kind, amount: Amount) -> None:
        self.totals.work[kind] = plus(self.totals.work.get(kind, NOTHING), amount)

    def _follow_copies(self, function: Any, args: Any, inputs: list[Tensor]) -> None:
        """Count the gradients of a group of FSDP with one rank, which copies them in place of a reduce-scatter."""
        if function is torch.ops.fsdp.chunk_cat.default and args[2] == 1:
            self._copies_gradients = True
        elif self._copies_gradients and function is torch.ops.aten.copy_.default:
            self._copies_gradients = False
            self._assign(args[0].untyped_storage(), GRADIENTS)

    def _count_behind(self, kind: Kind, amount: Amount) -> None:
        """Count an operation that the node after that of a message computes, before it waits."""
        if self._message is None:
            return
        message, nodes = self._message
        node = torch._C._current_autograd_node() if _in_backward() else None
        if node not in nodes:
            nodes.append(node)
        if node is None or len(nodes) > 2:
            self._message = None
        elif node is not nodes[0]:
            key = message, kind
            self.totals.behind[key] = plus(self.totals.behind.get(key, NOTHING), amount)

    def _follow_pass(self) -> None:
        """Note the module of the next operation of a backward pass, and what the first one finds alive."""
        if not _in_backward():
            self._behind = ""  # the next backward pass begins in no module
            return
        node = torch._C._current_autograd_node()
        if node is not None:
            # Only the node of a module's output has the name, and the nodes behind it keep that name.
            self._behind = cast(dict[str, str], node.metadata).get(_MODULE, self._behind)
        self._has_passed = True
        # What forward passes keep for the first backward pass: a second microbatch adds nothing new.
        self.held = self.held or self.alive

    def _component_of(self, function: Any, inputs: list[Tensor], outputs: list[Tensor]) -> str:
        if self._default is not None:
            return self._default
        if function.namespace == "fsdp":
            # FSDP's other operation, `chunk_cat`, fills the buffer of gradients that a reduce-scatter sends.
            return GATHERED if "all_gather" in function.__name__ or "split" in function.__name__ else COMMUNICATION
        if function.namespace == "bitsandbytes":
            return CASTS
        # A copy of a weight in a smaller type is one of autocast.
        is_smaller = function in _CASTING and outputs[0].dtype.itemsize < inputs[0].dtype.itemsize
        if is_smaller and self._component.get(inputs[0].untyped_storage()._cdata) in (PARAMETERS, GATHERED):
            return CASTS
        if not self._inside:
            return TEMPORARY if _in_backward() else LOSS
        # Recomputation enables gradients, so its results are activations again.
        return TEMPORARY if _in_backward() and not torch.is_grad_enabled() else ACTIVATIONS

    def is_on_host(self, tensor: Tensor) -> bool:
        return any((self._component.get(s._cdata) or "").endswith(_ON_HOST) for s in _storages(tensor))

    def _phase(self) -> str:
        if _in_backward():
            # A module is entered in a backward pass to be recomputed.
            return RECOMPUTED if self._inside else BACKWARD
        # Outside of modules, the optimizer alone runs without gradients.
        return FORWARD if self._inside or torch.is_grad_enabled() else OPTIMIZER_STEP

    def _count_collective(self, function: Any, args: Any, inputs: list[Tensor]) -> None:
        group = next(
            (dist.ProcessGroup.unbox(arg).group_name for arg in args if isinstance(arg, torch.ScriptObject)
             and "ProcessGroup" in str(arg._type())), "",
        )  # fmt: skip
        name = function._overloadpacket.__name__
        collective = Collective(name, group, self._module(_in_backward()), self._phase())
        call = Traffic(1, max((tensor.nbytes for tensor in inputs), default=0))
        # Arguments at the end with their default values are left out; the default is not to wait.
        arguments = dict(zip((one.name for one in function._schema.arguments), args, strict=False))
        is_begun = arguments.get("async_op", True) and _in_backward()
        self._message = (collective, [torch._C._current_autograd_node()]) if is_begun else None
        self.totals.traffic[collective] = plus(self.totals.traffic.get(collective, Traffic(0, 0)), call)
        if "reduce_scatter" in name:  # of sharded gradients; the input is a buffer
            for tensor in inputs:
                self._assign(tensor.untyped_storage(), COMMUNICATION)
            # The smallest tensor is this rank's shard.
            self._assign(min(inputs, key=lambda tensor: tensor.nbytes).untyped_storage(), GRADIENTS)


def on_host(component: str) -> str:
    """Return the component of the same tensors on the host."""
    return component + _ON_HOST


def _in_backward() -> bool:
    # Torch has the id -1 outside of backward passes.
    return torch._C._current_graph_task_id() != -1


def _tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of the arguments or results of an operation; `tree_leaves` takes several times as long."""
    if isinstance(tree, Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple | list) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _storages(tensor: Any) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of a tensor, and of the tensors that it wraps."""
    if not isinstance(tensor, Tensor):
        return  # such as the mesh of a `DTensor`
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _storages(getattr(tensor, name))
    else:
        yield tensor.untyped_storage()


def _number(tensor: Tensor) -> float | int | bool:
    """Return the number that stands for the value of a fake tensor of one element: finite, and not zero."""
    return True if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1


_CASTING = frozenset(
    (torch.ops.aten._to_copy.default, torch.ops.aten.empty_like.default, torch.ops.aten.new_empty.default)
)
_ANSWERS = {
    torch.ops.aten._local_scalar_dense.default: _number,
    torch.ops.aten.equal.default: lambda *_: True,
    torch.ops.aten.is_nonzero.default: lambda *_: True,
}
"""The answers of operations that read values, which a fake tensor does not have."""
