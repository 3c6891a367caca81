"""The questions of the probe to torch, CUDA and gloo. No other module of the package imports them.

They run in a forked process, so a driver that hangs or a library that aborts ends only this process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from trainer.tools.doctor.facts import Facts, GlooFacts, Gpu, GpuFacts, TorchFacts

_GLOO_SECONDS = 8.0


def answer(connection: Connection, kinds: tuple[type[Facts], ...], seconds: float) -> None:
    """Send the facts of each kind, or its error, one after the other; end after `seconds`."""
    # A process group of its own, which `Probe.close` kills with all processes that a question starts.
    os.setsid()
    # The fork may have inherited a handler, and by default SIGALRM ends the process.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)  # also if the parent is killed
    nowhere = os.open(os.devnull, os.O_RDWR)
    # By descriptors, because drivers and libraries in C print to them.
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    for kind in kinds:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                connection.send(_ASKERS[kind]())
        except BaseException as error:
            connection.send(_one_line(error))


def _one_line(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].strip().split("\n")[0]


def torch_facts(torch: Any) -> TorchFacts:
    """Return the build of the imported torch."""
    on_gpus = torch.version.cuda is not None or torch.version.hip is not None
    return TorchFacts(
        version=torch.__version__,
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        architectures=tuple(torch._C._cuda_getArchFlags().split()) if on_gpus else (),
    )


def ask_gloo() -> GlooFacts:
    """Sum a number over two processes, as a training does; must run before CUDA starts, which does not allow a fork."""
    import torch
    import torch.distributed as dist

    limit = timedelta(seconds=_GLOO_SECONDS)
    meet = partial(dist.TCPStore, "127.0.0.1", timeout=limit)  # type: ignore[attr-defined]
    read, write = os.pipe()
    other = os.fork()
    begun = time.monotonic()
    try:
        if other:
            # With the port 0, the system chooses a free one, and the pipe passes it to the other process.
            store = meet(0, is_master=True, wait_for_workers=False)
            os.write(write, store.port.to_bytes(2, "big"))
        else:
            store = meet(int.from_bytes(os.read(read, 2), "big"))
        dist.init_process_group("gloo", store=store, rank=0 if other else 1, world_size=2, timeout=limit)
        number = torch.tensor([3.0 if other else 4.0])
        dist.all_reduce(number)
        if number.item() != 7.0:
            raise RuntimeError(f"the sum of 3 and 4 over two processes was {number.item()}")
        seconds = time.monotonic() - begun
        dist.barrier()
        return GlooFacts(seconds, _addresses(store.port))
    finally:
        if not other:
            os._exit(0)
        with suppress(ProcessLookupError):
            os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)


def _addresses(store_port: int) -> tuple[str, ...]:
    """Return the local addresses of this process's connections, except those to the store."""
    import psutil

    found = {
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.raddr and store_port not in (connection.laddr.port, connection.raddr.port)
    }
    return tuple(sorted(found))


def driver_cuda() -> tuple[int, int] | None:
    """Return the newest CUDA version of the driver's library (cuDriverGetVersion); None without a library."""
    try:
        driver = ctypes.CDLL("libcuda.so.1" if sys.platform == "linux" else "libcuda.dylib")
    except OSError:
        return None
    number = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    # The number of CUDA 12.4 is 12040.
    return number.value // 1000, number.value % 1000 // 10


def gpu_facts(torch: Any) -> GpuFacts:
    """Return the GPUs of the imported torch; uses no GPU memory."""
    if torch.version.cuda is None and torch.version.hip is None:
        return GpuFacts()
    driver = driver_cuda() if torch.version.cuda else None
    try:
        torch.cuda.init()
    except Exception as error:
        return GpuFacts(driver_cuda=driver, error=_one_line(error))
    gpus = tuple(_gpu(torch, index) for index in range(torch.cuda.device_count()))
    return GpuFacts(gpus, driver)


def _gpu(torch: Any, index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    is_amd = torch.version.hip is not None
    return Gpu(
        name=properties.name,
        uuid=str(getattr(properties, "uuid", "")),
        capability=(properties.major, properties.minor),
        architecture=properties.gcnArchName.split(":")[0] if is_amd else None,
        total_bytes=properties.total_memory,
        bf16=is_amd or properties.major >= 8,  # from Ampere on
    )


_ASKERS: Mapping[type[Facts], Callable[[], Facts]] = {
    TorchFacts: lambda: torch_facts(import_module("torch")),
    GlooFacts: ask_gloo,
    GpuFacts: lambda: gpu_facts(import_module("torch")),
}
KINDS = tuple(_ASKERS)
"""All kinds of facts, in the order of the questions."""
