"""Blocks of the attention kernels, timed on a GPU beside torch's attention, within a limit of time.

    python -m tests.benchmarks.attention_blocks --seconds 60 --json blocks.json

For each size of heads, mask and dropout, the most valuable first:

- forward, and forward and backward, of torch's attention and of the kernels with their present blocks;
- each kernel alone with each block of `BLOCKS`;
- forward, and forward and backward, with the fastest blocks, and the largest difference from the present ones.

Other processes compile the kernels meanwhile. Blocks that spill many registers, or need more shared memory than the GPU
has, are not timed. The file is complete JSON after each result.

In Triton's interpreter (`TRITON_INTERPRET=1`) it runs tiny sizes without a GPU: this checks the script.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.kernel_compiling import compiled_for
from trainer.features.kernels import attention_blocks, attention_kernels, fused_attention
from trainer.features.kernels.attention_blocks import Block
from trainer.parallel import kernel_support

KERNELS = {"forward": "forward_kernel", "of_queries": "query_gradient_kernel", "of_keys": "key_gradient_kernel"}
MOST_STACK = 512  # bytes of a thread; a kernel with more is not timed
WARM_UP, SAMPLES, CALLS, MOST_MILLISECONDS = 2, 5, 8, 20.0
CYCLES_A_SECOND = 2e9  # of the fastest GPUs


@dataclass(frozen=True)
class Size:
    """The size of a call: heads of `dim` over rows of one length."""

    rows: int
    length: int
    heads: int
    dim: int


@dataclass(frozen=True)
class Flavour:
    """The constants that make another kernel."""

    dim: int
    causal: bool
    dropout: float


# The most valuable first.
FLAVOURS = [
    Flavour(128, True, 0.1),
    Flavour(64, False, 0.1),
    Flavour(128, True, 0.0),
    Flavour(64, False, 0.0),
    Flavour(64, True, 0.1),
    Flavour(64, True, 0.0),
]
SIZES = {
    (64, False): [Size(128, 128, 12, 64), Size(42, 384, 12, 64), Size(2, 8192, 12, 64)],
    (64, True): [Size(2, 8192, 12, 64)],
    (128, True): [Size(2, 2048, 32, 128)],
}
TINY = Size(2, 40, 2, 16)
BLOCKS = {
    (64, "forward"): [
        Block(64, 32, 4, 3), Block(64, 64, 4, 3), Block(128, 64, 8, 3), Block(64, 32, 4, 4), Block(32, 32, 2, 3),
    ],
    (64, "of_queries"): [Block(64, 32, 4, 3), Block(64, 64, 4, 3), Block(64, 32, 4, 4), Block(64, 16, 4, 3)],
    (64, "of_keys"): [Block(32, 64, 4, 3), Block(32, 64, 4, 2), Block(32, 64, 4, 4), Block(32, 128, 8, 3)],
    (128, "forward"): [
        Block(64, 32, 4, 3), Block(64, 64, 4, 3), Block(128, 64, 8, 3), Block(128, 32, 8, 3), Block(64, 32, 4, 2),
    ],
    (128, "of_queries"): [
        Block(64, 32, 4, 3), Block(64, 32, 4, 2), Block(64, 64, 4, 2), Block(128, 64, 8, 2), Block(64, 16, 4, 3),
    ],
    (128, "of_keys"): [
        Block(32, 32, 4, 3), Block(32, 64, 4, 1), Block(16, 64, 4, 3), Block(32, 64, 4, 3), Block(64, 64, 4, 1),
        Block(32, 128, 8, 2), Block(32, 32, 4, 2), Block(64, 128, 8, 1),
    ],
}  # fmt: skip
TINY_BLOCKS = [Block(32, 16, 1, 1), Block(16, 32, 1, 1)]


@dataclass(frozen=True)
class Job:
    """A kernel to compile: with a block, or with the present one."""

    kernel: str
    flavour: Flavour
    block: Block | None


class NoKernel:
    """A kernel that is not launched."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *arguments, **options: None


class Call:
    """The arguments of one call."""

    def __init__(self, size: Size, flavour: Flavour, device: str) -> None:
        shape = (size.rows, size.length, size.heads, size.dim)
        make = torch.empty if device == "cpu" and not kernel_support.is_interpreted() else torch.randn
        self.tensors = [make(shape, device=device, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]
        self.of_output = make(shape, device=device, dtype=torch.bfloat16)
        self.flavour, self.size = flavour, size
        rows = torch.arange(size.rows, device=device)
        self.others = (rows, None, None, None, None, size.dim**-0.5, flavour.dropout, flavour.causal, [0, 0, 0])
        sizes = [size.heads, size.length, size.length]
        self.drawn = (rows, None, sizes, flavour.dropout, flavour.causal, [0, 0, 0])

    @contextmanager
    def using(self, kernels: Collection[str], **changed: Block) -> Iterator[None]:
        """Compute with these blocks in place of the present ones, and launch these kernels only."""
        query = self.tensors[0]
        blocks = attention_blocks.blocks(query.device, query.dtype, self.size.dim, False)._replace(**changed)
        others = {name: NoKernel() for kernel, name in KERNELS.items() if kernel not in kernels}
        namespace = SimpleNamespace(**{**vars(attention_kernels), **others})
        with (
            mock.patch.object(attention_blocks, "blocks", return_value=blocks),
            mock.patch.object(fused_attention, "_kernels", return_value=namespace),
        ):
            yield

    def bits(self) -> Tensor | None:
        return fused_attention._draw(*self.drawn) if self.flavour.dropout else None

    def forward(self, bits: Tensor | None) -> tuple[Tensor, Tensor]:
        return fused_attention._attend(*self.tensors, *self.others, None, None, None, bits)

    def backward(self, bits: Tensor | None, output: Tensor, sums: Tensor) -> list[Tensor]:
        of_rows = (None, None, None)
        return fused_attention.backward_of(
            self.of_output, output, sums, *self.tensors, *self.others, False, *of_rows, bits
        )

    def both(self) -> list[Tensor]:
        bits = self.bits()
        output, sums = self.forward(bits)
        return [output, *self.backward(bits, output, sums)]

    def of_torch(self) -> Tensor:
        return F.scaled_dot_product_attention(
            *self.tensors, dropout_p=self.flavour.dropout, is_causal=self.flavour.causal
        )

    def both_of_torch(self) -> list[Tensor]:
        tensors = [tensor.detach().requires_grad_() for tensor in self.tensors]
        output = F.scaled_dot_product_attention(*tensors, dropout_p=self.flavour.dropout, is_causal=self.flavour.causal)
        return [output, *torch.autograd.grad(output, tensors, self.of_output.transpose(1, 2))]


def compile_one(job: Job, capability: tuple[int, int]) -> dict[str, Any]:
    """Compile a kernel into Triton's cache, and return its resources."""
    blocks = {job.kernel: job.block} if job.block else {}
    call = Call(SIZES[job.flavour.dim, job.flavour.causal][0], job.flavour, "cpu")
    try:
        with compiled_for(capability) as found, call.using([job.kernel], **blocks):
            bits = fused_attention._empty_bits(*call.drawn) if job.flavour.dropout else None
            launch(call, job.kernel, bits, *fused_attention._empty_results(*call.tensors, *call.others))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:200]}
    return {key: value for key, value in found[0]._asdict().items() if key != "kernel"}


def launch(call: Call, kernel: str, bits: Tensor | None, output: Tensor, sums: Tensor) -> object:
    return call.forward(bits) if kernel == "forward" else call.backward(bits, output, sums)


class NoTimeLeftError(Exception):
    """The limit of time is reached."""


class Clock:
    """The time of the device for a call, without the waits for the host."""

    def __init__(self, is_gpu: bool) -> None:
        self._is_gpu = is_gpu

    def milliseconds(self, step: Callable[[], object]) -> dict[str, float]:
        """Return the median time of a step on the device, and the time in which the host launches it."""
        if not self._is_gpu:
            started = time.perf_counter()
            step()
            return {"ms": 1e3 * (time.perf_counter() - started)}
        for _ in range(WARM_UP):
            step()
        torch.cuda.synchronize()
        started = time.perf_counter()
        step()
        host = time.perf_counter() - started
        torch.cuda.synchronize()
        whole = 1e3 * (time.perf_counter() - started)
        calls = max(1, min(CALLS, int(MOST_MILLISECONDS / whole)))
        found = []
        for _ in range(SAMPLES):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(int(1.5 * calls * host * CYCLES_A_SECOND))  # the host launches all calls meanwhile
            begin.record()
            started = time.perf_counter()
            for _ in range(calls):
                step()
            host = (time.perf_counter() - started) / calls
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / calls)
        return {"ms": statistics.median(found), "host_ms": 1e3 * host}


class Report:
    """The results, in a file that is complete after each of them."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self._path, self._results = path, {**about, "results": []}

    def add(self, **result: Any) -> None:
        self._results["results"].append(result)
        print(json.dumps(result), flush=True)
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self._results, indent=1) + "\n")
        os.replace(part, self._path)


class Measurements:
    """The measurements of one flavour."""

    def __init__(
        self, flavour: Flavour, device: str, compiled: Callable[[Job], dict[str, Any]], report: Report, deadline: float
    ) -> None:
        self._flavour, self._compiled, self._report, self._deadline = flavour, compiled, report, deadline
        tiny = device == "cpu"
        sizes = [TINY] if tiny else SIZES[flavour.dim, flavour.causal]
        self._blocks = {kernel: TINY_BLOCKS if tiny else BLOCKS[flavour.dim, kernel] for kernel in KERNELS}
        self._calls = [Call(size, flavour, device) for size in sizes]
        self._clock = Clock(not tiny)
        self._fastest: list[dict[str, tuple[float, Block]]] = [{} for _ in sizes]

    def _time(self, call: Call, name: str, step: Callable[[], object], **more: Any) -> float | None:
        """Add the time of a step to the report and return it; None, with the error, if it fails."""
        if time.monotonic() > self._deadline:
            raise NoTimeLeftError
        about = {"size": asdict(call.size), "flavour": asdict(self._flavour), "step": name, **more}
        try:
            found = self._clock.milliseconds(step)
        except Exception as error:
            self._report.add(**about, error=f"{type(error).__name__}: {error}"[:200])
            return None
        self._report.add(**about, **found)
        return found["ms"]

    def of_torch(self) -> None:
        for call in self._calls:
            self._time(call, "torch, forward", call.of_torch)
            self._time(call, "torch, both", call.both_of_torch)

    def of_present(self) -> None:
        for kernel in KERNELS:
            self._compiled(Job(kernel, self._flavour, None))
        for call in self._calls:
            self._whole(call, "present")

    def _whole(self, call: Call, name: str, **more: Any) -> None:
        self._time(call, f"{name}, draw", call.bits, **more)
        self._time(call, f"{name}, forward", lambda: call.forward(call.bits()), **more)
        self._time(call, f"{name}, both", call.both, **more)

    def of_each_kernel(self) -> None:
        for kernel in KERNELS:
            for block in self._blocks[kernel]:
                usage = self._compiled(Job(kernel, self._flavour, block))
                if "error" in usage or usage.get("stack_bytes", 0) > MOST_STACK:
                    self._report.add(flavour=asdict(self._flavour), step=kernel, block=block, left_out=usage)
                    continue
                for call, fastest in zip(self._calls, self._fastest, strict=True):
                    self._time_kernel(call, fastest, kernel, block, usage)

    def _time_kernel(
        self, call: Call, fastest: dict[str, tuple[float, Block]], kernel: str, block: Block, usage: dict[str, Any]
    ) -> None:
        with call.using(KERNELS):
            bits = call.bits()
            output, sums = call.forward(bits)
        with call.using([kernel], **{kernel: block}):
            found = self._time(call, kernel, lambda: launch(call, kernel, bits, output, sums), block=block, **usage)
        if found is not None:
            fastest[kernel] = min(fastest.get(kernel, (found, block)), (found, block))

    def of_fastest(self) -> None:
        for call, fastest in zip(self._calls, self._fastest, strict=True):
            blocks = {kernel: block for kernel, (_, block) in fastest.items()}
            with call.using(KERNELS):
                expected = call.both()
            with call.using(KERNELS, **blocks):
                pairs = zip(call.both(), expected, strict=True)
                difference = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
                self._whole(call, "fastest", blocks=blocks, difference=difference)


def run(seconds: float, path: Path, processes: int) -> None:
    deadline = time.monotonic() + seconds - (time.time() - psutil.Process().create_time())
    if kernel_support.is_interpreted():
        report = Report(path, {"device": "cpu"})
        return measure([Measurements(FLAVOURS[0], "cpu", lambda job: {}, report, deadline)], report)
    with multiprocessing.get_context("fork").Pool(processes) as pool:  # before this process opens the GPU
        capability = torch.cuda.get_device_capability()
        about = {"device": torch.cuda.get_device_name(), "capability": capability, "torch": torch.__version__}
        report = Report(path, about)
        jobs = [Job(kernel, flavour, None) for flavour in FLAVOURS for kernel in KERNELS]
        for flavour in FLAVOURS:
            jobs += [Job(kernel, flavour, block) for kernel in KERNELS for block in BLOCKS[flavour.dim, kernel]]
        results = {job: pool.apply_async(compile_one, (job, capability)) for job in jobs}

        def compiled(job: Job) -> dict[str, Any]:
            try:
                return results[job].get(max(0.0, deadline - time.monotonic()))
            except multiprocessing.TimeoutError:
                raise NoTimeLeftError from None

        measure([Measurements(flavour, "cuda", compiled, report, deadline) for flavour in FLAVOURS], report)


def measure(parts: list[Measurements], report: Report) -> None:
    """Run the steps of all parts, the most valuable first, until their deadline."""
    steps = [part.of_torch for part in parts] + [part.of_present for part in parts]
    for part in parts:
        steps += [part.of_each_kernel, part.of_fastest]
    for step in steps:
        try:
            step()
        except NoTimeLeftError:
            print("no time is left", flush=True)
            return
        except Exception as error:  # the other steps run
            report.add(step=step.__name__, error=f"{type(error).__name__}: {error}"[:200])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("blocks.json"), help="the file of the results")
    parser.add_argument("--seconds", type=float, default=60.0, help="the limit of time, imports among it")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="that compile")
    options = parser.parse_args()
    run(options.seconds, options.json, options.processes)


if __name__ == "__main__":
    main()
