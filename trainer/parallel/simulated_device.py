"""The device that a plan simulates, with tensors on the CPU that have no memory.

Functions that choose by the device ask this module too, so that a plan has the operations of the simulated one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SimulatedDevice:
    """The traits of a simulated device: whether it is a GPU, and whether the kernels of this project run on it."""

    is_gpu: bool
    runs_kernels: bool


_CURRENT: ContextVar[SimulatedDevice | None] = ContextVar("simulated_device", default=None)


@contextmanager
def simulated_device(is_gpu: bool, runs_kernels: bool) -> Iterator[None]:
    token = _CURRENT.set(SimulatedDevice(is_gpu, is_gpu and runs_kernels))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def simulated() -> SimulatedDevice | None:
    """Return the simulated device; None outside of a plan."""
    return _CURRENT.get()


def is_cpu(device: torch.device) -> bool:
    """Return whether a device is a CPU, and simulates no GPU."""
    current = simulated()
    return device.type == "cpu" and not (current is not None and current.is_gpu)
