"""Launches of Triton kernels that cost the host little.

Triton looks at every argument of every launch to find the compiled kernel. For the attention kernels, which have some
60 arguments, this takes the host longer than many of them take the device. Here the few facts that determine the
arguments find the launch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

_MOST_KEPT = 4096  # keys; widths of batches vary
_ALIGNED_BYTES = 16  # Triton compiles one kernel for addresses that this divides, and one for others


class Launch(NamedTuple):
    """A kernel, its grid, and the arguments after its tensors: numbers, and constants with Triton's options."""

    kernel: Any
    grid: tuple[int, ...]
    numbers: Sequence[Any]
    constants: Mapping[str, Any]


_Started = tuple[Callable[..., object], Sequence[Any]]
_kept: dict[tuple[Hashable, ...], list[_Started]] = {}


def facts_of(*tensors: Tensor | None) -> tuple[Hashable, ...]:
    """Return the facts of tensors on which kernels and their arguments depend."""
    return tuple(
        None
        if tensor is None
        else (tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % _ALIGNED_BYTES == 0)
        for tensor in tensors
    )


def launch(facts: tuple[Hashable, ...], tensors: Sequence[Sequence[Any]], plan: Callable[[], Sequence[Launch]]) -> None:
    """Launch kernels on the current stream.

    Args:
        facts: all that determines the result of `plan`, and the types and the alignment of `tensors`: a name, the
            device, numbers, and `facts_of` tensors that are not new.
        tensors: the first arguments of each kernel, on that device.
        plan: returns the launches; it is called if none with these facts are kept.
    """
    found = _kept.get(facts)
    if found is not None:
        for (start, others), own in zip(found, tensors, strict=True):
            start(*own, *others)
        return
    started: list[_Started] = []
    for (kernel, grid, numbers, constants), own in zip(plan(), tensors, strict=True):
        compiled = kernel[grid](*own, *numbers, **constants)
        if compiled is not None:
            names = kernel.arg_names[len(own) + len(numbers) :]
            started.append((compiled[(*grid, 1, 1)[:3]], (*numbers, *(constants[name] for name in names))))
    if len(started) == len(tensors):  # the interpreter compiles nothing
        if len(_kept) >= _MOST_KEPT:
            _kept.clear()
        _kept[facts] = started
