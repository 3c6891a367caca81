"""Triton kernels compiled for a GPU that is not there, and the registers and memory that they use."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from trainer.parallel import kernel_support

WARP_SIZE = 32


class Usage(NamedTuple):
    """The resources of a compiled kernel."""

    kernel: str
    registers: int  # of a thread
    stack_bytes: int  # of a thread: registers that are spilled to memory
    shared_bytes: int  # of a block


class AbsentGpu:
    """The part of Triton's driver that compiling asks for."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._arch = capability[0] * 10 + capability[1]

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, WARP_SIZE)

    def get_current_device(self) -> int:
        return self._arch  # Triton keeps the compiled kernels of each device apart

    def get_current_stream(self, device: int) -> int:
        return 0


def _usage(name: str, compiled: Any) -> Usage:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", shown)
    assert found is not None, shown
    return Usage(name, int(found[1]), int(found[2]), compiled.metadata.shared)


@contextmanager
def compiled_for(capability: tuple[int, int]) -> Iterator[list[Usage]]:
    """Compile the kernels that are launched in this context instead of running them, and list what they use.

    The code that launches them may pass tensors of the CPU, which need no values.
    """
    found: list[Usage] = []
    run = JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled = run(kernel, *arguments, grid=grid, warmup=True, **options)
        found.append(_usage(kernel.fn.__name__, compiled))

    with (
        mock.patch.object(driver, "_active", AbsentGpu(capability)),
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(kernel_support, "capability", return_value=capability),
    ):
        yield found


@contextmanager
def specialised_for(capability: tuple[int, int]) -> Iterator[dict[str, set[str]]]:
    """List the distinct kernels that Triton would compile in this context, by the names of their functions."""
    found: dict[str, set[str]] = {}

    def bind_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        bind = kernel.device_caches[driver.active.get_current_device()][-1]
        _, specialisation, _ = bind(*arguments, debug=False, instrumentation_mode="", **options)
        found.setdefault(kernel.fn.__name__, set()).add(str(specialisation))

    with (
        mock.patch.object(driver, "_active", AbsentGpu(capability)),
        mock.patch.object(JITFunction, "run", bind_only),
        mock.patch.object(kernel_support, "capability", return_value=capability),
    ):
        yield found
