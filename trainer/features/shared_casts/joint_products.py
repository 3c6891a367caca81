"""One product for the queries, keys and values of an attention module, which get the same input.

The layers and their parameters stay apart. In a step, the copies of their weights in 16 bits are parts of one tensor,
and so are their outputs and gradients. The gradient of the input is summed in fp32 inside of the product, and rounded
once. The first training pass shows which layers share an input.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from trainer.features.shared_casts.inputs import rounded_input, take_users
from trainer.models.attention import JOINT_STATES
from trainer.models.forward_context import with_method
from trainer.parallel.tensor.kinds import JOINT, PLAIN
from trainer.parallel.tensor.linear import ColumnParallelLinear

_PREFIX = "joint_"  # of the names of joint parameters
_JOINT, _PLACE = "joint_product", "joint_place"  # attributes of a layer: its `Joint`, and its place there


class _Output(NamedTuple):
    """The place of an output `[batch, positions, features]` in memory, which it may leave."""

    storage: Any  # a weak reference, which keeps the identity from others
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor) -> _Output:
        return cls(_storage_of(x), int(x.storage_offset()), x.shape, x.stride())

    def is_state(self, state: Tensor) -> bool:
        """Return whether a state `[batch, heads, positions, head_dim]` is a view of this output."""
        heads, dim = state.shape[1], state.shape[3]
        if (state.shape[0], state.shape[2], heads * dim) != tuple(self.shape) or state.storage_offset() != self.offset:
            return False
        expected = (self.strides[0], dim, self.strides[1], 1)
        is_placed = all(a == b for a, b, size in zip(state.stride(), expected, state.shape, strict=True) if size > 1)
        return is_placed and bool(_storage_of(state).cdata == self.storage.cdata)


def _storage_of(x: Tensor) -> Any:
    return StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]


class AttentionWatch:
    """An attention module, which looks at its first training passes.

    Args:
        layers: linear layers of the module.
    """

    def __init__(self, attention: nn.Module, layers: Sequence[nn.Module]) -> None:
        self._attention, self._layers = attention, layers
        self.has_run = False
        self._input: Callable[[], Tensor | None] = lambda: None
        self._run: tuple[int, ...] = ()  # layers that got this input, one after the other
        self._runs: dict[tuple[int, ...], None] = {}
        self._outputs: dict[int, _Output] = {}
        self._states: set[tuple[int | None, ...]] = set()  # the layers of the states of each call of attention
        self._handles = []
        for number, layer in enumerate(layers):
            self._handles.append(layer.register_forward_pre_hook(partial(self._begin, number), prepend=True))
            self._handles.append(layer.register_forward_hook(partial(self._end, number)))
        setattr(attention, JOINT_STATES, self)

    def joints(self, fits: Callable[[Tensor], bool]) -> Iterator[Joint]:
        """End the watch, and yield the products of the layers that shared an input before each call of attention.

        Args:
            fits: whether a parameter may be part of a joint one.
        """
        for handle in self._handles:
            handle.remove()
        delattr(self._attention, JOINT_STATES)
        self._end_run()
        places = [number for run in self._runs for number in run]
        if len(self._states) != 1 or len(set(places)) < len(places):
            return
        (states,) = self._states
        for run in self._runs:
            layers = [self._layers[number] for number in run]
            are_alike = all(map(_is_plain, layers)) and len({layer.bias is None for layer in layers}) == 1
            if len(run) > 1 and are_alike and all(fits(weight) for layer in layers for weight in layer.parameters()):
                yield Joint(layers, [number in states for number in run], self._attention if run == states else None)

    def whole(self, *states: Tensor) -> None:
        if self._outputs and not torch.compiler.is_compiling():
            of_state = (next((n for n, out in self._outputs.items() if out.is_state(x)), None) for x in states)
            self._states.add(tuple(of_state))
            self._end_run()
            self._outputs = {}

    def _end_run(self) -> None:
        if self._run:
            self._runs[self._run] = None
        self._run = ()

    def _begin(self, number: int, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        if _is_recorded(layer):
            x = arguments[0] if arguments else None
            if self._input() is not x or number in self._run:
                self._end_run()
            self._run, self.has_run = (*self._run, number), True
            if x is not None:
                self._input = weakref.ref(x)

    def _end(self, number: int, layer: nn.Module, _: object, output: Tensor) -> None:
        if _is_recorded(layer):
            self._outputs[number] = _Output.of(output)


def _is_recorded(layer: nn.Module) -> bool:
    return not torch.compiler.is_compiling() and layer.training and torch.is_grad_enabled()


class Joint:
    """The product of several layers with the same input, in a context that sets the joint parameters.

    Args:
        layers: linear layers, in the order of their calls.
        are_states: whether attention gets the output of each layer as it is.
        attention: the attention module, if it gets all outputs as they are.
    """

    def __init__(self, layers: Sequence[nn.Module], are_states: Sequence[bool], attention: nn.Module | None) -> None:
        self._layers = layers
        # The joint parameters lie in a module: a compiler knows that their shapes do not change.
        self._first: Any = layers[0]
        self._sizes = [len(layer.weight) for layer in layers]  # type: ignore[arg-type]
        # Attention keeps its states. One that is a view would keep the outputs of the other layers too.
        self._are_copied = [is_state and not all(are_states) for is_state in are_states]
        self._input: Tensor | None = None
        self._parts: Sequence[Tensor] = ()
        self._is_asked = attention is not None
        self._whole: Tensor | None = None
        users = [take_users(layer) for layer in layers]
        self._users = users[0]
        if attention is not None:
            setattr(attention, JOINT_STATES, self)
        for place, layer in enumerate(layers):
            # A class and plain attributes: a compiler makes one graph for layers that differ in objects only.
            layer.__class__ = _joined(type(layer))  # type: ignore[arg-type]  # a class is hashable
            setattr(layer, _JOINT, self)
            setattr(layer, _PLACE, place)

    @property
    def attributes(self) -> dict[str, Any]:
        """The dictionary in which the context sets the joint parameters."""
        attributes: dict[str, Any] = vars(self._first)
        return attributes

    def parameters(self) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
        """Yield the names of the joint parameters, and the parameters of the layers."""
        for name, _ in self._first.named_parameters(recurse=False):
            yield f"{_PREFIX}{name}", tuple(getattr(layer, name) for layer in self._layers)

    def whole(self, *states: Tensor) -> Tensor | None:
        whole, self._whole = self._whole, None
        if whole is None or torch.compiler.is_compiling():
            return whole  # the first passes have shown that the states are parts of it
        parts = map(_Output.of, torch.split(whole, self._sizes, -1))
        return whole if all(part.is_state(state) for part, state in zip(parts, states, strict=True)) else None

    def part(self, place: int, x: Tensor) -> Tensor | None:
        """Return the output of the layer at a place for its input; None: the layer has an input of its own."""
        if place == 0 and hasattr(self._first, JOINT):
            self._multiply(x)
        elif self._input is not x:
            return None
        part = self._parts[place]
        if place == len(self._sizes) - 1:
            self._input, self._parts = None, ()
        return part

    def _multiply(self, x: Tensor) -> None:
        rounded = x if self._users is None else rounded_input(x, self._users)
        multiply = self._first.multiply if isinstance(self._first, ColumnParallelLinear) else F.linear
        whole = multiply(rounded, self._first.joint_weight, getattr(self._first, f"{_PREFIX}bias", None))
        parts = zip(torch.split(whole, self._sizes, -1), self._are_copied, strict=True)
        self._parts = [part.contiguous() if is_copied else part for part, is_copied in parts]
        self._input, self._whole = x, whole if self._is_asked else None


@cache
def _joined(kind: Any) -> Any:
    """Return the class of the layers of a joint product that have a class."""

    def forward(layer: Any, x: Tensor) -> Tensor:
        part: Tensor | None = getattr(layer, _JOINT).part(getattr(layer, _PLACE), x)
        return kind.forward(layer, x) if part is None else part

    return with_method(kind, "forward", forward)


def watches(models: Iterable[nn.Module]) -> list[AttentionWatch]:
    """Return the modules of models that may be attention with several products of one input."""
    found = [
        (module, [layer for layer in module.children() if _is_linear(layer)])
        for model in models
        for module in model.modules()
    ]
    return [AttentionWatch(module, layers) for module, layers in found if len(layers) > 1]


def _is_linear(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear or isinstance(layer, ColumnParallelLinear)


def _is_plain(layer: nn.Module) -> bool:
    """Return whether a layer multiplies its input by its weight, adds its bias, and does nothing else."""
    if "forward" in vars(layer):
        return False
    if isinstance(layer, ColumnParallelLinear):
        is_other = layer.transposed or layer.shared_input or layer.lora or layer.trained_rows
        return not is_other and type(layer).multiply in PLAIN
    return not any(layer.children())
