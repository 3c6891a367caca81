"""Ceilings of one GPU, and its kernels of attention and updates beside those of torch.

    python -m tests.benchmarks.gpu_ceilings ceilings attention updates --json ceilings.json

- `ceilings`: matrix products of the measured models, copies of 1 GiB, and the host's launches.
- `attention`: forward and backward of our kernels, with and without dropout, and of torch's kernels, each named.
- `updates`: AdamW of BERT-large's matrices with clipping and bf16 copies, by torch and by this trainer.

Each result is in the file as soon as it is known. A kernel that refuses a call has its error in its place. `--tiny`
checks this script on a CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.benchmarks.attention_blocks import Call, Flavour, Size
from trainer.base.disk import replace_text
from trainer.engine.optimizers.parameters import TrainedParameters
from trainer.engine.optimizers.table import build_optimizer
from trainer.parallel import kernel_support
from trainer.parallel.weight_copies import KeptCopy, kept_copy
from trainer.recipe.schema import AdamW

Result = tuple[str, Callable[[], dict[str, Any]]]
WARM_UP, SAMPLES, LAUNCHES = 3, 9, 400
PRODUCTS = {
    "BERT-large, attention": (12288, 1024, 1024),
    "BERT-large, feed-forward": (12288, 1024, 4096),
    "BERT-base, feed-forward": (4096, 768, 3072),
    "Llama 1B, feed-forward": (4096, 2048, 8192),
    "Llama 1B, head": (4096, 2048, 128256),
}
"""Rows, inner size and columns of products in bf16."""
CALLS = {
    "BERT-large 32 x 384": (Size(32, 384, 16, 64), False),
    "BERT-base 32 x 128": (Size(32, 128, 12, 64), False),
    "Llama 1B 2 x 2048, causal": (Size(2, 2048, 32, 64), True),
}
BACKENDS = {"FlashAttention": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
DROPOUT = 0.1


def seconds_of(step: Callable[[], object], is_gpu: bool) -> float:
    """Return the median seconds of a step on the device."""
    found = []
    for _ in range(WARM_UP + SAMPLES if is_gpu else 2):
        if is_gpu:
            torch.cuda.synchronize()
        started = time.perf_counter()
        step()
        if is_gpu:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return statistics.median(found[WARM_UP if is_gpu else 1 :])


class Measures:
    """The parts, on the GPU, or tiny on a CPU."""

    def __init__(self, tiny: bool) -> None:
        self.tiny, self.is_gpu = tiny, torch.cuda.is_available()
        self.device = torch.device("cuda" if self.is_gpu else "cpu")
        self.scale = 64 if tiny else 1

    def ceilings(self) -> Iterator[Result]:
        for name, shape in PRODUCTS.items():
            yield f"product, {name}", partial(self._product, [max(8, size // self.scale) for size in shape])
        yield "copy", self._copy
        yield "launch", self._launch

    def _product(self, shape: Sequence[int]) -> dict[str, Any]:
        rows, inner, columns = shape
        a, b = (
            torch.randn(size, dtype=torch.bfloat16, device=self.device) for size in ((rows, inner), (inner, columns))
        )
        seconds = seconds_of(lambda: a @ b, self.is_gpu)
        return {"seconds": seconds, "flops_per_second": 2 * rows * inner * columns / seconds}

    def _copy(self) -> dict[str, Any]:
        source = torch.zeros(2**30 // 4 // self.scale**2, device=self.device)
        target = torch.empty_like(source)
        seconds = seconds_of(lambda: target.copy_(source), self.is_gpu)
        return {"seconds": seconds, "bytes_per_second": 2 * source.nbytes / seconds}

    def _launch(self) -> dict[str, Any]:
        one = torch.zeros(1, device=self.device)

        def launch() -> None:
            for _ in range(LAUNCHES):
                one.add_(1)

        found = {"seconds": seconds_of(launch, self.is_gpu) / LAUNCHES}
        if self.is_gpu:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                launch()
            found["graph_seconds"] = seconds_of(graph.replay, True) / LAUNCHES
        return found

    def attention(self) -> Iterator[Result]:
        for name, (size, causal) in CALLS.items():
            shape = Size(2, 40, 2, 16) if self.tiny else size
            for dropout in (DROPOUT, 0.0):
                kind = "dropout" if dropout else "no dropout"
                call = partial(Call, shape, Flavour(shape.dim, causal, dropout), str(self.device))
                if self.is_gpu or kernel_support.is_interpreted():
                    yield f"{name}, {kind}, ours", partial(self._attention, call, Call.both)
                for backend, kernel in BACKENDS.items():
                    yield f"{name}, {kind}, {backend}", partial(self._attention, call, self._by(kernel))

    def _by(self, kernel: SDPBackend) -> Callable[[Call], object]:
        def both(call: Call) -> object:
            # CPUs have no cuDNN, and FlashAttention without dropout only.
            with sdpa_kernel(kernel if self.is_gpu else SDPBackend.MATH):
                return call.both_of_torch()

        return both

    def _attention(self, made: Callable[[], Call], both: Callable[[Call], object]) -> dict[str, Any]:
        call = made()
        return {"seconds": seconds_of(lambda: both(call), self.is_gpu)}

    def updates(self) -> Iterator[Result]:
        yield "torch, fused", partial(self._update, self._of_torch)
        yield "ours", partial(self._update, self._ours)

    def _update(self, made: Callable[[list[nn.Parameter]], Callable[[], None]]) -> dict[str, Any]:
        width = 1024 // self.scale
        shapes = [*[(width, width)] * 4, (4 * width, width), (width, 4 * width)] * (1 if self.tiny else 24)
        weights = [nn.Parameter(torch.zeros(shape, device=self.device)) for shape in shapes]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        step = made(weights)
        seconds, elements = seconds_of(step, self.is_gpu), sum(weight.numel() for weight in weights)
        found = {"seconds": seconds, "elements": elements, "nanoseconds_per_element": 1e9 * seconds / elements}
        if self.is_gpu:
            found["peak_bytes"] = torch.cuda.max_memory_allocated()
        return found

    def _of_torch(self, weights: list[nn.Parameter]) -> Callable[[], None]:
        return _clipped_and_rounded(weights, torch.optim.AdamW(weights, fused=True))

    def _ours(self, weights: list[nn.Parameter]) -> Callable[[], None]:
        named = {str(number): weight for number, weight in enumerate(weights)}
        optimizer = build_optimizer(AdamW(), TrainedParameters(named))
        if not optimizer.scales_gradients:  # the kernel does not run here
            return _clipped_and_rounded(weights, optimizer)
        for weight in weights:
            copy = cast(KeptCopy, kept_copy(weight))
            copy.tensor, copy.version = weight.detach().bfloat16(), weight._version

        def step() -> None:
            norm = nn.utils.get_total_norm([cast(torch.Tensor, weight.grad) for weight in weights])
            optimizer.factor = (1.0 / (norm + 1e-6)).clamp(max=1.0)
            optimizer.step()

        return step


def _clipped_and_rounded(weights: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a step that clips the gradients before the optimizer, and rounds the weights after it."""
    copies = [torch.empty_like(weight, dtype=torch.bfloat16) for weight in weights]

    def step() -> None:
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        torch._foreach_copy_(copies, [weight.detach() for weight in weights])

    return step


PARTS = ("ceilings", "attention", "updates")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", choices=PARTS, nargs="+", help="the parts to measure")
    parser.add_argument("--json", type=Path, default=Path("ceilings.json"), help="the file of the results")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to check this script; works without a GPU")
    options = parser.parse_args(arguments)
    measures, results = Measures(options.tiny), dict[str, dict[str, Any]]()
    for part in options.parts:
        results[part] = {}
        for name, measure in getattr(measures, part)():
            try:
                found = measure()
            except Exception as error:  # the others are worth measuring
                found = {"error": f"{type(error).__name__}: {str(error)[-300:]}"}
            results[part][name] = found
            print(f"{part}, {name}: {json.dumps(found)}", flush=True)
            replace_text(options.json, json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
