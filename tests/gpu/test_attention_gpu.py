"""The fused attention kernel on a GPU: the right numbers, its memory, and its speed beside torch's attention.

`pytest -rP` prints times and memory. The functions take a device and sizes, so that the interpreter can try them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainer.features.kernels import fused_attention
from trainer.models.attention import FLAT_ATTENTION, keyed_attention
from trainer.models.dropout import key_dropout, site_of
from trainer.models.padded_attention import PaddedRows
from trainer.parallel import kernel_support, varlen
from trainer.parallel.dropout import DropoutKeys, MicrobatchKey
from trainer.parallel.flat_rows import FlatRows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GPU = torch.device("cuda", 0)
TOKENS, WIDTH = 16_384, 1024  # of a measured batch, and of all its heads
WARM_UP, REPEATS = 5, 20
NONE = 1e-9  # a dropout that drops nothing, but runs the kernel
LENGTHS = (128, 384, 512, 2048, 8192)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Attention(nn.Module):
    is_causal = False


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call; as BERT-large has them by default. Rows of `lengths` are joined, `length` is their sum."""

    length: int
    batch: int = 1
    heads: int = 2
    key_heads: int = 2
    dim: int = 64
    mask: str = "none"
    bias: bool = False
    lengths: tuple[int, ...] = ()

    @classmethod
    def joined(cls, *lengths: int, **others: Any) -> Sizes:
        return cls(sum(lengths), lengths=lengths, **others)

    @property
    def window(self) -> int:
        return max(2, min(64, max(self.lengths or (self.length,)) // 8))

    def tensors(self, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        random = torch.Generator(device).manual_seed(0)
        shapes = [(heads, self.dim) for heads in (self.heads, self.key_heads, self.key_heads)]
        found = [
            torch.randn(self.batch, self.length, *shape, generator=random, device=device).to(dtype).transpose(1, 2)
            for shape in shapes
        ]
        if self.bias:
            found.append(torch.randn(1, self.heads, self.length, self.length, generator=random, device=device))
        return [tensor.requires_grad_() for tensor in found]

    def masked(self, device: torch.device) -> Tensor | None:
        positions = torch.arange(self.length, device=device)
        if self.mask == "padding":
            return (positions < self.length * 3 // 4).expand(self.batch, 1, self.length, self.length)
        if self.mask == "window":
            near = (positions[:, None] - positions).abs() <= self.window
            return near.expand(self.batch, 1, self.length, self.length)
        return None


class Keyed:
    """Attention with the masks of the rows of one microbatch."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.keys = DropoutKeys(7)
        model = nn.ModuleDict({"attention": Attention()})
        key_dropout(model, self.keys)
        self.module = model["attention"]
        self.flat = FlatRows.of(sizes.lengths, max(sizes.lengths), device) if sizes.lengths else None
        self.window = sizes.window + 1 if sizes.mask == "window" else None
        num_rows = len(sizes.lengths) or sizes.batch
        self.key = MicrobatchKey(1, torch.arange(num_rows, device=device) + 3, self.flat)
        self.mask = None if sizes.lengths else sizes.masked(device)
        self.is_causal = sizes.mask == "causal"

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, dropout: float = 0.1):
        options: dict[str, Any] = {"dropout": dropout, "is_causal": self.is_causal}
        with self.keys.use(self.key):
            if self.flat is not None:
                options |= {"flat": self.flat, "sliding_window": self.window}
                return ALL_ATTENTION_FUNCTIONS[FLAT_ATTENTION](self.module, query, key, value, None, **options)[0]
            return keyed_attention(self.module, query, key, value, self.mask, position_bias=bias, **options)[0]


@contextmanager
def eager() -> Iterator[None]:
    why = "the test wants the eager function"
    with (
        mock.patch.object(kernel_support, "obstacle", return_value=why),
        mock.patch.object(varlen, "obstacle", return_value=why),
    ):
        yield


def results(attend: Callable[..., Tensor], tensors: list[Tensor], dropout: float) -> list[Tensor]:
    output = attend(*tensors, dropout=dropout)
    weights = torch.linspace(-1, 1, output.shape[1], device=output.device)[None, :, None, None]
    return [output, *torch.autograd.grad((output * weights).sum(), tensors)]


def errors(sizes: Sizes, dtype: torch.dtype, device: torch.device, dropout: float = 0.1) -> list[tuple[float, float]]:
    """Return the errors of the kernel and of the eager function, of the output and each gradient, relative to fp32."""
    attend, tensors = Keyed(sizes, device), sizes.tensors(dtype, device)
    found = results(attend, tensors, dropout)
    with eager():
        own = results(attend, tensors, dropout)
        exact = results(attend, [tensor.detach().float().requires_grad_() for tensor in tensors], dropout)
    relative = [
        [float((one.float() - right).abs().max() / right.abs().max()) for one, right in zip(some, exact, strict=True)]
        for some in (found, own)
    ]
    return list(zip(*relative, strict=True))


def assert_as_exact(sizes: Sizes, dtype: torch.dtype, device: torch.device, dropout: float = 0.1) -> None:
    for error, eager_error in errors(sizes, dtype, device, dropout):
        assert error < max(1e-4, 2 * eager_error), (error, eager_error)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [*LENGTHS, 100, 1000])
@pytest.mark.parametrize("mask", ["none", "causal", "padding", "window"])
def test_it_computes_as_the_eager_function(length, mask, dtype):
    assert_as_exact(Sizes(length, mask=mask, key_heads=1), dtype, GPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [24, 32, 64, 80, 96, 128, 256])
def test_every_size_of_heads(dim, dtype):
    assert_as_exact(Sizes(400, batch=2, dim=dim, mask="padding"), dtype, GPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [100, 512])
def test_the_bias_of_t5(length, dtype):
    assert_as_exact(Sizes(length, batch=3, bias=True, mask="padding"), dtype, GPU)


JOINED = (700, 3, 128, 512, 1, 257)


@pytest.mark.parametrize("dropout", [0.1, 0.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", ["none", "causal", "window"])
def test_joined_rows_are_padded_rows(mask, dtype, dropout):
    """Without dropout, in 16 bits, by torch's variable-length attention, which takes shared keys from torch 2.12 on."""
    sizes = Sizes.joined(*JOINED, mask=mask, key_heads=1 if dropout or varlen._HAS_GROUPS else 2)
    query, key, value = sizes.tensors(dtype, GPU)
    is_torchs = not dropout and dtype != torch.float32 and varlen.obstacle_of_device(query.device) is None
    assert (varlen.obstacle(query, key, value) is None) == is_torchs
    with mock.patch.object(varlen, "attention", wraps=varlen.attention) as torchs:
        assert_as_exact(sizes, dtype, GPU, dropout)
    assert torchs.called == is_torchs


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, 50])
def test_padded_rows_need_no_mask(is_causal, window):
    """Without dropout, beside SDPA in fp32 with a mask; one row has its padding before its tokens."""
    lengths, length = [300, 1, 128, 257], 300
    places = torch.arange(length, device=GPU)
    tokens = places < torch.tensor(lengths, device=GPU)[:, None]
    tokens[2] = tokens[2].flip(0)
    distances = places[:, None] - places
    mask = tokens[:, None, None] & (distances.abs() <= (length if window is None else window))
    mask = mask & (distances >= 0) if is_causal else mask
    tensors = Sizes(length, batch=4).tensors(torch.bfloat16, GPU)

    def attend(query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0) -> Tensor:
        if query.dtype == torch.float32:
            output = F.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2)
        else:
            output = PaddedRows(tokens, is_causal, window).attention(query, key, value, 64**-0.5)
        return output.masked_fill(~tokens[..., None, None], 0.0)

    exact = results(attend, [tensor.detach().float().requires_grad_() for tensor in tensors], 0.0)
    for found, expected in zip(results(attend, tensors, 0.0), exact, strict=True):
        torch.testing.assert_close(found.float(), expected, atol=2e-2 * float(expected.abs().max()), rtol=0)


def test_joined_rows_need_no_memory_for_padding():
    """One row of 4,096 tokens and 31 of 64: padded, they have 22 times the tokens."""
    sizes = Sizes.joined(4096, *[64] * 31)
    attend, tensors = Keyed(sizes, GPU), sizes.tensors(torch.bfloat16, GPU)
    for dropout in (0.1, 0.0):
        results(attend, tensors, dropout)  # compiles
        peak = peak_bytes(lambda dropout=dropout: results(attend, tensors, dropout))
        print(f"dropout {dropout}: {peak} bytes")
        assert peak < 16 * 4 * tensors[0].numel(), "less than 16 tensors of fp32"


def mask_in_output(size: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The mask that the kernel applied, and that of the definition, computed on the CPU."""
    sizes = Sizes(size, batch=2, heads=3, key_heads=3)
    query = torch.zeros(2, 3, size, 64, device=device, dtype=dtype)
    value = torch.eye(size, device=device, dtype=dtype).expand(2, 3, size, size)
    attend = Keyed(sizes, device)
    with torch.no_grad():
        drawn = attend(query, query, value, dropout=0.4)  # by the kernel itself
    output = attend(query.requires_grad_(), query, value, dropout=0.4).detach()
    assert torch.equal(output > 0, drawn > 0)
    with attend.keys.use(MicrobatchKey(1, torch.arange(2) + 3)):
        expected = site_of(attend.module).mask((2, 3, size, size), 0.4)
    return (output.transpose(1, 2) > 0).cpu(), expected.bool()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_mask_is_that_of_the_cpu_bit_for_bit(dtype):
    assert torch.equal(*mask_in_output(256, GPU, dtype))


@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
def test_without_a_drop_it_computes_as_torchs_attention(mask):
    sizes = Sizes(2048, mask=mask)
    tensors = sizes.tensors(torch.bfloat16, GPU)
    output = Keyed(sizes, GPU)(*tensors, dropout=NONE)
    expected = F.scaled_dot_product_attention(*tensors, sizes.masked(GPU), is_causal=mask == "causal")
    torch.testing.assert_close(output, expected.transpose(1, 2), atol=2e-2, rtol=2e-2)


def test_the_same_call_twice_is_the_same_in_every_bit():
    sizes = Sizes(1000, batch=4, heads=4, key_heads=2, mask="window", bias=True)
    attend, tensors = Keyed(sizes, GPU), sizes.tensors(torch.bfloat16, GPU)
    for one, other in zip(results(attend, tensors, 0.1), results(attend, tensors, 0.1), strict=True):
        assert torch.equal(one, other)


def test_a_compiled_layer_has_one_graph():
    sizes = Sizes(512, mask="padding")
    tensors = sizes.tensors(torch.bfloat16, GPU)
    mask, rows = sizes.masked(GPU), torch.arange(1, device=GPU)

    def layer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tiles = fused_attention.visible_tiles(mask, query, key, value) or (None, None)
        arguments = (query * 2, key, value, rows, mask, None, *tiles, 0.125, 0.1, False, [0, 0, 0])
        return fused_attention.fused_attention(*arguments)[0] + 1

    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(*tensors), layer(*tensors), atol=2e-2, rtol=2e-2)


def peak_bytes(step: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
def test_its_memory_grows_with_the_length_and_not_with_its_square(mask):
    peaks = {}
    for length in (2048, 4096, 8192):
        sizes = Sizes(length, mask=mask)
        attend, tensors = Keyed(sizes, GPU), sizes.tensors(torch.bfloat16, GPU)
        results(attend, tensors, 0.1)  # compiles
        peaks[length] = peak_bytes(lambda attend=attend, tensors=tensors: results(attend, tensors, 0.1))
    print(f"{mask}: {peaks}")
    assert peaks[8192] < 2.2 * peaks[4096] < 2.2**2 * peaks[2048]
    assert peaks[8192] < 2 * 8192**2, "less than a byte for each query, key and head"


def milliseconds(step: Callable[[], object]) -> float:
    """Return the median time of a step on the GPU."""
    for _ in range(WARM_UP):
        step()
    times = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def speeds(sizes: Sizes, device: torch.device, timer: Callable[[Callable[[], object]], float]) -> dict[str, float]:
    """Return the milliseconds of a forward and backward pass of one layer, by the way of computing attention."""
    attend, tensors = Keyed(sizes, device), sizes.tensors(torch.bfloat16, device)
    dense = sizes.masked(device)

    def torchs(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        output = F.scaled_dot_product_attention(query, key, value, dense, dropout, is_causal=sizes.mask == "causal")
        return output.transpose(1, 2)

    found = {
        "fused, 0.1": timer(lambda: results(attend, tensors, 0.1)),
        "fused, none": timer(lambda: results(attend, tensors, NONE)),
        "SDPA, 0.1": timer(lambda: results(torchs, tensors, 0.1)),
        "SDPA, none": timer(lambda: results(torchs, tensors, 0.0)),
    }
    if sizes.length <= 2048:  # the eager function stores all probabilities
        with eager():
            found["eager, 0.1"] = timer(lambda: results(attend, tensors, 0.1))
    return found


def speeds_of_rows(
    sizes: Sizes, device: torch.device, timer: Callable[[Callable[[], object]], float]
) -> dict[str, float]:
    """Return the milliseconds of both passes of one layer over flat rows, by the way of computing attention."""
    attend, tensors = Keyed(sizes, device), sizes.tensors(torch.bfloat16, device)
    flat = attend.flat
    assert flat is not None

    def padded(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        outputs = []
        for group in flat.groups:
            rows = [group.pad(states.transpose(1, 2)).transpose(1, 2) for states in (query, key, value)]
            mask, keys = group.mask(None, False), attend.key.rows[group.rows]
            found = keyed_attention(attend.module, *rows, mask, dropout, is_causal=False, row_keys=keys)[0]
            outputs.append(group.join(found))
        return torch.cat(outputs).unsqueeze(0)

    return {
        "joined, 0.1": timer(lambda: results(attend, tensors, 0.1)),
        "joined, fused, none": timer(lambda: results(attend, tensors, NONE)),
        "joined, none": timer(lambda: results(attend, tensors, 0.0)),
        "padded, 0.1": timer(lambda: results(padded, tensors, 0.1)),
        "padded, none": timer(lambda: results(padded, tensors, 0.0)),
    }


@pytest.mark.parametrize("dim", [64, 128])
def test_speed_of_flat_rows(dim):
    """The lengths are spread evenly from a quarter of the longest up to it."""
    for length in LENGTHS:
        number = max(2, TOKENS // length)
        lengths = [length - (length * 3 // 4) * index // (number - 1) for index in range(number)]
        heads = WIDTH // dim
        found = speeds_of_rows(Sizes.joined(*lengths, heads=heads, key_heads=heads, dim=dim), GPU, milliseconds)
        shown = ", ".join(f"{name} {time:.3f} ms" for name, time in found.items())
        print(f"{sum(lengths)} tokens, up to {length}, heads of {dim}: {shown}")
        if length in (512, 2048):
            assert found["joined, 0.1"] < found["padded, 0.1"]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", ["none", "causal", "padding", "window"])
def test_speed(mask, dim):
    for length in LENGTHS:
        heads = WIDTH // dim
        found = speeds(Sizes(length, max(1, TOKENS // length), heads, heads, dim, mask), GPU, milliseconds)
        shown = ", ".join(f"{name} {time:.3f} ms" for name, time in found.items())
        print(f"{TOKENS} tokens, length {length}, heads of {dim}, {mask}: {shown}")
        if length in (512, 2048):
            assert found["fused, 0.1"] < found["eager, 0.1"]
