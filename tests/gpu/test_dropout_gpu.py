"""The dropout kernel on a GPU: output and gradients of the eager function in every bit, its memory and its speed.

`pytest -rP` prints times. The functions take a device, so that the interpreter can try them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.features.kernels import fused_dropout
from trainer.parallel import kernel_support
from trainer.parallel.dropout import DropoutKeys, DropoutSite, MicrobatchKey, _Streams
from trainer.parallel.flat_rows import FlatRows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GPU = torch.device("cuda", 0)
WARM_UP, REPEATS, CALLS = 5, 20, 10
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = (5, 3, 8, 1)
LENGTHS = (3, 5, 0, 2)  # of rows that are joined
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "hidden states": ((2, 3, 48), {}),
    "odd sizes": ((2, 7, 127), {}),
    "vectors": ((2, 30), {}),
    "one feature": ((2, 3, 1), {}),
    "several programs for a row": ((2, 1, 2061), {}),
    "heads of probabilities": ((2, 3, 5, 9), {"cut_dim": 1, "part": 2}),
    "queries of probabilities": ((2, 3, 5, 9), {"cut_dim": 2, "part": 3}),
    "features of a rank": ((2, 3, 32), {"cut_dim": -1, "part": 3}),
    "features inside of a word": ((2, 3, 10), {"cut_dim": -1, "part": 3}),
    "features before a new program": ((2, 3, 1023), {"cut_dim": -1, "part": 1}),
    "positions of a rank": ((2, 3, 20), {"cut_dim": 1, "sequence": SimpleNamespace(start=7, dim=1)}),
    "shared": ((6, 20), {"shared_from": 0}),
    "shared, three dimensions": ((2, 6, 20), {"shared_from": 0}),
    "no rows": ((2, 0, 20), {}),
    "flat rows": ((1, 10, 18), {"flat": True}),
    "flat rows, features of a rank": ((1, 10, 18), {"flat": True, "cut_dim": -1, "part": 3}),
    "flat rows of a rank, padded": (
        (1, 10, 18),
        {"flat": True, "cut_dim": 1, "sequence": SimpleNamespace(start=4, dim=1)},
    ),
}


@contextmanager
def fused() -> Iterator[None]:
    """Fail where the eager function draws a mask."""
    with mock.patch.object(_Streams, "mask", side_effect=AssertionError("not fused")):
        yield


@contextmanager
def eager() -> Iterator[None]:
    with mock.patch.object(kernel_support, "obstacle", return_value="the test wants the eager function"):
        yield


def random(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def drop(x: Tensor, p: float = 0.3, residual: Tensor | None = None, **site: Any) -> Tensor:
    """Return the result of a site's first call in a microbatch, of flat rows if the site is flat."""
    flat = FlatRows.of(LENGTHS, max(LENGTHS), x.device) if site.get("flat") else None
    num_rows = len(ROWS) if flat else x.shape[0]
    keys = DropoutKeys(1)
    with keys.use(MicrobatchKey(2, torch.tensor(ROWS[:num_rows], device=x.device), flat)):
        return DropoutSite(keys, "site", **site).drop(x, p, residual=residual)


def as_eager(x: Tensor, p: float = 0.3, residual: Tensor | None = None, **site: Any) -> Tensor:
    """Return the output of the kernel. Output and gradients are those of the eager function in every bit."""
    found: list[list[Tensor]] = []
    for how in (fused, eager):
        own = [tensor.detach().requires_grad_() for tensor in (x, residual) if tensor is not None]
        with how():
            output = drop(own[0], p, *own[1:], **site)
            gradient = random(output.shape, x.device, output.dtype, 1)
            found.append([output, *torch.autograd.grad(output, own, gradient)])
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(bits(one), bits(other))
    return found[0][0]


def bits(x: Tensor) -> Tensor:
    """Return the bits of numbers; all NaN are alike."""
    return x.nan_to_num(nan=12345.0, posinf=torch.inf, neginf=-torch.inf).contiguous().view(torch.uint8)


def not_finite(dtype: torch.dtype, device: torch.device) -> Tensor:
    x = random((2, 3, 64), device, dtype)
    x[:, 0, ::3], x[:, 1, ::3], x[:, 2, ::3] = torch.nan, torch.inf, torch.finfo(dtype).max
    return x


@pytest.mark.parametrize("name", CASES)
def test_is_the_eager_function(name: str):
    shape, site = CASES[name]
    as_eager(random(shape, GPU), **site)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [1e-9, 0.1, 0.99999])
def test_in_each_type(dtype: torch.dtype, p: float):
    x = random((4, 128, 768), GPU, dtype)
    output = as_eager(x, p)
    with eager():
        assert torch.equal(output == 0, (drop(x.cpu(), p) == 0).to(GPU)), "the mask is that of a CPU"
    as_eager(not_finite(dtype, GPU), p)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of_residual", DTYPES)
def test_with_a_residual(dtype: torch.dtype, of_residual: torch.dtype):
    shape = (4, 128, 768)
    as_eager(random(shape, GPU, dtype), 0.1, random(shape, GPU, of_residual, 2))


def test_a_compiled_function_has_one_graph():
    keys, site = torch.tensor([7, 9], device=GPU), DropoutSite(DropoutKeys(1), "site")

    def layer(x: Tensor) -> Tensor:
        return site.drop(x * 2, 0.3, keys) + 1

    x = random((2, 3, 64), GPU)
    found, expected = torch.compile(layer, fullgraph=True)(x), layer(x)
    assert torch.equal(found == 1, expected == 1), "the mask is that of the kernel"
    torch.testing.assert_close(found, expected)  # a fused product and sum round once


def test_no_mask_is_kept():
    x = random((4, 1024, 1024), GPU, torch.bfloat16).requires_grad_()
    drop(x)  # compiles
    before = torch.cuda.memory_allocated()
    output = drop(x)
    kept = torch.cuda.memory_allocated() - before
    assert kept <= output.numel() * output.element_size() + 2**16


def milliseconds(step: Callable[[], object]) -> float:
    """Return the median time of a step on the GPU, in which the host is ahead."""
    for _ in range(WARM_UP):
        step()
    times = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(10_000_000)
        begin.record()
        for _ in range(CALLS):
            step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / CALLS)
    return statistics.median(times)


def speeds(
    shape: tuple[int, int, int], device: torch.device, timer: Callable[[Callable[[], object]], float]
) -> dict[str, float]:
    """Return the milliseconds of a forward and backward pass over activations in bf16."""
    x = random(shape, device, torch.bfloat16).requires_grad_()
    gradient, keys, site = torch.ones_like(x), torch.arange(len(x), device=device), DropoutSite(DropoutKeys(1), "site")

    def step(dropped: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(dropped(), x, gradient)

    residual = torch.zeros_like(x, dtype=torch.float32)  # as after a norm under autocast
    found = {
        "torch's dropout": timer(step(lambda: F.dropout(x, 0.1))),
        "ours": timer(step(lambda: site.drop(x, 0.1, keys))),
    }
    gradient = gradient.float()
    found |= {
        "torch's with a residual": timer(step(lambda: F.dropout(x, 0.1) + residual)),
        "ours with a residual": timer(step(lambda: site.drop(x, 0.1, keys, residual))),
    }
    gradient = gradient.bfloat16()
    for words in (64, 128, 512):
        with mock.patch.object(fused_dropout, "_MOST_WORDS", words):
            found[f"{words} words a program"] = timer(step(lambda: site.drop(x, 0.1, keys)))
    with eager():
        found["operations of torch"] = timer(step(lambda: site.drop(x, 0.1, keys)))
    return found


@pytest.mark.parametrize("shape", [(32, 128, 768), (16, 1024, 1024), (4, 2048, 4096)])
def test_times(shape: tuple[int, int, int]):
    found = speeds(shape, GPU, milliseconds)
    print(f"{list(shape)}, forward and backward: " + ", ".join(f"{name} {time:.4f} ms" for name, time in found.items()))
    assert found["ours"] < found["operations of torch"]
