"""Launches of Triton kernels that cost the host little.

Triton looks at every argument of every launch to find the compiled kernel. For the attention kernels, which have some
60 arguments, this takes the host longer than many of them take the device. Here the few facts that determine the
arguments find the launch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import infer_schema

_MOST_KEPT = 4096  # keys; widths of batches vary
_ALIGNED_BYTES = 16  # Triton compiles one kernel for addresses that this divides, and one for others


MOVED: dict[Any, Callable[[list[Tensor]], list[Tensor]]] = {}
"""For operations that change their arguments: the tensors that one call reads or writes, from those that it gets."""
KEPT: set[Any] = set()
"""Operations that are expensive to recompute, relative to the memory of their results."""


def operation(
    name: str, schema: str = "", moved: Callable[[list[Tensor]], list[Tensor]] | None = None, kept: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as an operation of torch on CPUs and GPUs, and return the way to call it.

    The dispatcher takes the host as long as the launch of a kernel, so a call passes it only if somebody else may want
    to see the operation. `torch.library.custom_op` and `register_autograd` would take several times as long.

    Args:
        schema: the operation's arguments and results; by default those of the annotations, which change no argument.
        moved: the tensors for `MOVED`; None: the operation reads each argument once.
        kept: whether it is in `KEPT`.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        torch.library.define(name, schema or infer_schema(function, mutates_args=()))
        # On CPUs too, where Triton's interpreter runs the kernels.
        torch.library.impl(name, ("cpu", "cuda"), function)
        packet = getattr(torch.ops.trainer, name.partition("::")[2])
        dispatched = packet.default
        if moved is not None:
            MOVED[packet] = moved
        if kept:
            KEPT.add(dispatched)

        def call(first: Tensor, *others: Any) -> Any:
            return (dispatched if _is_watched(first) else function)(first, *others)

        return call

    return register


def _is_watched(tensor: Tensor) -> bool:
    """Return whether a compiler, autograd, a mode, a profiler or a subclass of tensors wants to see operations."""
    return (
        torch.compiler.is_compiling()
        or type(tensor) is not Tensor
        or (tensor.requires_grad and torch.is_grad_enabled())  # torch warns of gradients that an operation lacks
        or torch._C._len_torch_dispatch_stack() > 0
        or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    )


class Launch(NamedTuple):
    """A kernel, its grid, and the arguments after its tensors: numbers, and constants with Triton's options."""

    kernel: Any
    grid: tuple[int, ...]
    numbers: Sequence[Any]
    constants: Mapping[str, Any]


class _Started(NamedTuple):
    """A compiled kernel: its launcher, the grid, and the launcher's arguments before and after the tensors."""

    run: Callable[..., object]
    grid: tuple[int, ...]
    code: tuple[Any, ...]
    others: Sequence[Any]


_kept: dict[tuple[Hashable, ...], tuple[Callable[[], int], list[_Started]]] = {}


def facts_of(*tensors: Tensor | None) -> tuple[Hashable, ...]:
    """Return the facts of tensors on which kernels and their arguments depend."""
    return tuple(
        [
            None
            if tensor is None
            else (tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % _ALIGNED_BYTES == 0)
            for tensor in tensors
        ]
    )


def launch(facts: tuple[Hashable, ...], tensors: Sequence[Sequence[Any]], plan: Callable[[], Sequence[Launch]]) -> None:
    """Launch kernels on the current stream.

    Args:
        facts: all that determines the result of `plan`, and the types and the alignment of `tensors`: a name, the
            device, numbers, and `facts_of` tensors that are not new.
        tensors: the first arguments of each kernel, on that device.
        plan: returns the launches; it is called if none with these facts are kept.
    """
    # The usual way: no argument is looked at again, and Triton's own search is left out.
    kept = _kept.get(facts)
    if kept is not None:
        stream = kept[0]()
        for (run, grid, code, others), operands in zip(kept[1], tensors, strict=True):
            run(*grid, stream, *code, *operands, *others)
        return
    started: list[_Started] = []
    for (kernel, grid, numbers, constants), operands in zip(plan(), tensors, strict=True):
        # The first launch goes through Triton, which finds or compiles the kernel; later ones call it directly.
        compiled = kernel[grid](*operands, *numbers, **constants)
        if compiled is not None:
            names = kernel.arg_names[len(operands) + len(numbers) :]
            # As in the launchers of torch's compiler: no metadata and no hooks, which only Triton's profiler reads.
            code = (compiled.function, compiled.packed_metadata, None, None, None)
            others = (*numbers, *(constants[name] for name in names))
            started.append(_Started(compiled.run, (*grid, 1, 1)[:3], code, others))
    if len(started) == len(tensors):  # the interpreter compiles nothing
        if len(_kept) >= _MOST_KEPT:
            # The next launches go through Triton again, which keeps its compiled kernels.
            _kept.clear()
        _kept[facts] = _current_stream(), started


def _current_stream() -> Callable[[], int]:
    """Return a function that returns the current stream of the current device, as Triton's launches do."""
    from triton.runtime.driver import driver

    return partial(driver.active.get_current_stream, driver.active.get_current_device())
