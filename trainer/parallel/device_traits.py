"""Traits of devices, which code that chooses by the device asks for.

A plan sets them: it computes shapes on a CPU, with the operations of the device that it plans for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceTraits:
    is_cpu: bool
    assumes_kernels: bool = False  # whether the kernels of this project count as running, without a look at the machine
    captures_graphs: bool = True  # whether CUDA graphs are captured, and not only run
    has_peers: bool = True  # whether the other ranks of the mesh answer


_REAL = {is_cpu: DeviceTraits(is_cpu) for is_cpu in (True, False)}
_PLANNED: ContextVar[DeviceTraits | None] = ContextVar("planned_traits", default=None)


@contextmanager
def planned_traits(traits: DeviceTraits | None) -> Iterator[None]:
    """Give each device these traits inside of this context; None: its real ones."""
    token = _PLANNED.set(traits)
    try:
        yield
    finally:
        _PLANNED.reset(token)


def traits_of(device: torch.device) -> DeviceTraits:
    return _PLANNED.get() or _REAL[device.type == "cpu"]
