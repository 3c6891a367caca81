"""The kernels of this project, which Triton compiles, and the devices that run them.

Triton comes with torch's builds for CUDA. Modules that launch kernels import it late, so that a plan knows their
operations on a machine without Triton.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from trainer.base.extensions import Registration, consume, resolved
from trainer.parallel.device_traits import traits_of

_LEAST_CAPABILITY = (8, 0)  # of NVIDIA's GPUs, for which Triton and FlashAttention are built and tested

KERNELS: dict[str, Any] = {}
"""The registered modules of kernels by their use, such as `dropout`. They are texts until `load`."""


def _add(row: Registration) -> None:
    KERNELS[row.name] = row.value


consume("kernel", _add)


def load() -> None:
    """Import the registered kernels, which defines their operations."""
    for name, value in KERNELS.items():
        KERNELS[name] = resolved(value)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # so a compiled graph imports nothing
def missing(name: str, device: torch.device) -> str | None:
    """Return the reason why the kernels for a use do not run on a device; None if they run, and `KERNELS` has them."""
    if (reason := obstacle(device)) is not None:
        return str(reason)
    if name not in KERNELS:
        return f"no kernel of {name} is installed"
    load()
    return None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # a compiled graph need not follow it
def is_interpreted() -> bool:
    """Return whether Triton interprets its kernels, on any device: it was imported with `TRITON_INTERPRET=1`."""
    # A look that does not import Triton: without an import, nothing is interpreted.
    knobs = getattr(sys.modules.get("triton"), "knobs", None)
    return knobs is not None and bool(knobs.runtime.interpret)


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of the GPU that the kernels of a device are compiled for."""
    return _answer(torch.cuda.get_device_capability, device)


@cache  # torch takes microseconds for each question
def _answer(ask: Callable[[torch.device], tuple[int, int]], device: torch.device) -> tuple[int, int]:
    return ask(device)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def obstacle(device: torch.device) -> str | None:
    """Return the reason why the kernels do not run on a device; None if they run."""
    if is_interpreted() or traits_of(device).assumes_kernels:
        return None
    if device.type != "cuda":
        return f"the device is a {device.type}, and the kernel needs an NVIDIA GPU"
    if find_spec("triton") is None:
        return "Triton is not installed (`pip install triton`)"
    if find_spec("triton.knobs") is None:
        return "Triton is older than 3.4 (`pip install --upgrade triton`)"
    return age_obstacle(device)


def age_obstacle(device: torch.device) -> str | None:
    """Return the reason why a GPU is too old for Triton and FlashAttention; None if it is not."""
    if capability(device) < _LEAST_CAPABILITY:
        return f"the GPU {torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    return None
