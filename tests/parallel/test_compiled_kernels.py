"""Every Triton kernel compiles for every GPU, fits its shared memory and spills no more than its table states.

Triton compiles for a GPU that is not there: these tests launch nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from trainer.engine.optimizers import fused_eight_bits  # noqa: F401  # registers its operations
from trainer.engine.optimizers.dynamic_map import MAPS
from trainer.parallel.kernels import attention_blocks, fused_attention, fused_dropout
from trainer.parallel.shards.scale_blocks import BLOCK

triton = pytest.importorskip("triton")

from tests.helpers.kernel_compiling import compiled_for, specialised_for  # noqa: E402  # imports Triton

SHARED_KIB = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
"""The most shared memory of a block, by capability: table "Technical Specifications" of NVIDIA's CUDA guide."""
ROWS, HEADS, LENGTH = 2, 4, 512


class Case(NamedTuple):
    """A call that launches kernels, and the bytes a thread that each may spill."""

    name: str
    launch: Callable[[], object]
    stack_bytes: int = 0


class Flags(NamedTuple):
    """The arguments of attention that make another kernel."""

    mask: torch.dtype | None = None
    has_bias: bool = False
    causal: bool = False
    dropout: float = 0.1
    joined: bool = False

    @property
    def has_floats(self) -> bool:
        return self.has_bias or (self.mask is not None and self.mask.is_floating_point)


FLAGS = {
    "padding": Flags(torch.bool),
    "causal": Flags(causal=True),
    "causal, no dropout": Flags(causal=True, dropout=0.0),
    "joined rows": Flags(joined=True),
    "additive mask": Flags(torch.float32),
    "bias": Flags(torch.bool, has_bias=True),
    "causal bias": Flags(has_bias=True, causal=True),
}
DIMS = (32, 64, 80, 96, 128, 256)
TYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def attend(kind: str, dim: int, flags: Flags, rows: int = ROWS, length: int = LENGTH, call: int = 0) -> None:
    """Compute attention and its gradients, those of tensors without values."""
    torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    dtype, joined = TYPES[kind], flags.joined
    shape = (1, rows * length, HEADS, dim) if joined else (rows, length, HEADS, dim)
    query, key, value = (torch.empty(shape, dtype=dtype).transpose(1, 2) for _ in range(3))
    mask = bias = None
    if flags.mask is not None:
        mask = torch.empty((rows, 1, length, length), dtype=flags.mask)
    if flags.has_bias:
        bias = torch.empty((1, HEADS, length, length))
    tiles = fused_attention.visible_tiles(mask, query, key, value) or (None, None)
    row_keys = torch.zeros((call + 1, rows), dtype=torch.int64)[call]
    arguments = (
        query, key, value, row_keys, mask, bias, *tiles, 0.125, flags.dropout, flags.causal, [0, 0, 0],
    )  # fmt: skip
    of_rows = (torch.zeros(rows + 1, dtype=torch.int32), [length] * rows, 64) if joined else ()
    output, sums = fused_attention.fused_attention(*arguments, *of_rows)
    fused_attention.backward_of(output, output, sums, *arguments, flags.has_bias, *of_rows)


def attention(kind: str, dim: int, *names: str) -> Iterator[Case]:
    for name in names or FLAGS:
        launch = partial(attend, kind, dim, FLAGS[name])
        stack_bytes = attention_blocks.STACK_BYTES[torch.finfo(TYPES[kind]).bits]
        yield Case(f"attention, {kind}, heads of {dim}, {name}", launch, stack_bytes)


def update_in_eight_bits(width: int, dtype: torch.dtype) -> None:
    """Update a large parameter that is whole, or a part of one."""
    weight = torch.empty(4096)
    first, second = (torch.empty(4096, dtype=codes.dtype) for codes in MAPS.values())
    scales, blocks = torch.empty(2, 16), torch.empty(4096 // width, dtype=torch.int32)
    values, codes = [torch.empty(256)] * 2, [torch.empty(1 << 18, dtype=codes.dtype) for codes in MAPS.values()]
    gradient, betas, corrections = weight.to(dtype), [0.9, 0.999], torch.empty(2)
    maxima = torch.empty(2, 16)
    torch.ops.trainer.raise_maxima_8bit(maxima, gradient, first, second, scales, values, blocks, width, betas)
    for place, largest in ((blocks, maxima), (None, None)):
        torch.ops.trainer.adamw_8bit(
            weight, gradient, first, second, scales, values, place, width, betas, codes, largest, corrections,
            torch.empty(()), 1e-8, 0.99,
        )  # fmt: skip


def eight_bits() -> Iterator[Case]:
    for width in (BLOCK, 64):
        for dtype in (torch.float32, torch.bfloat16):
            yield Case(f"8-bit AdamW, rows of {width}, {dtype}", partial(update_in_eight_bits, width, dtype))


def drop(
    dtype: torch.dtype, joined: bool, has_residual: bool, first: int, rows: int = ROWS, length: int = LENGTH
) -> None:
    """Drop activations, padded or joined; `first` is the first feature of a tensor rank."""
    tokens = torch.zeros(rows * length, dtype=torch.int64)
    x = torch.empty(1 if joined else rows, rows * length if joined else length, 1024, dtype=dtype)
    places = (tokens, tokens) if joined else (None, None)
    torch.ops.trainer.keyed_dropout(x, tokens[:rows], *places, [0, 0, first], 0.1, dtype, x if has_residual else None)


def dropout() -> Iterator[Case]:
    keys = torch.zeros((26, 1), dtype=torch.int64)
    yield Case("keys of rows", partial(fused_dropout.row_keys, keys, keys.view(-1)))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for flags in ((False, True, 0), (True, True, 0), (False, False, 6)):
            yield Case(f"dropout of {dtype}, {flags}", partial(drop, dtype, *flags))


# A row for each kernel; attention has one for each type and size of heads.
GRID: dict[str, Callable[[], Iterator[Case]]] = {
    "8-bit AdamW": eight_bits,
    "dropout": dropout,
    **{f"attention {kind} {dim}": partial(attention, kind, dim) for kind in TYPES for dim in DIMS},
}


def problems(case: Case, capability: tuple[int, int]) -> Iterator[str]:
    with compiled_for(capability) as found:
        case.launch()
    assert found, f"{case.name} launches no kernel"
    for usage in found:
        if usage.stack_bytes > case.stack_bytes:
            yield f"{case.name}: {usage} spills more than {case.stack_bytes} bytes"
        if usage.shared_bytes > SHARED_KIB[capability] * 1024:
            yield f"{case.name}: {usage} needs more shared memory than {SHARED_KIB[capability]} KiB"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[None]:
    """Compile anew, and leave the precision of products as it was."""
    allow_tf32 = torch.backends.cuda.matmul.allow_tf32
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        yield
    torch.backends.cuda.matmul.allow_tf32 = allow_tf32


@pytest.mark.parametrize("name", ["padding", "causal", "joined rows", "bias"])
def test_batches_of_other_sizes_need_no_other_kernels(name):
    """A compilation takes seconds. One kernel reads aligned strides, one all others."""
    with specialised_for((9, 0)) as found:
        for length in (17, 20, 32, 33, 48, 64, 100, 256, 257, 384, 511):
            for rows in (1, 2, 3, 8, 16):
                for call in (0, 1):  # its keys may lie at any place of a table
                    attend("bf16", 64, FLAGS[name], rows, length, call)
                drop(torch.bfloat16, FLAGS[name].joined, False, 0, rows, length)
    # From 256 keys on, the visible tiles are listed.
    most = {"padding": 4, "bias": 4}.get(name, 2)
    assert {"forward_kernel", "query_gradient_kernel", "key_gradient_kernel", "dropout_kernel"} <= found.keys()
    assert len(found["dropout_kernel"]) == 1
    assert {kernel: len(keys) for kernel, keys in found.items() if len(keys) > most} == {}


@pytest.mark.nightly
@pytest.mark.parametrize("capability", SHARED_KIB, ids=str)
@pytest.mark.parametrize("row", GRID)
def test_every_kernel(row, capability):
    assert [problem for case in GRID[row]() for problem in problems(case, capability)] == []


@pytest.mark.parametrize(
    "capability",
    [
        pytest.param(one, marks=pytest.mark.slow if one == (9, 0) else pytest.mark.nightly)
        for one in ((8, 0), (9, 0), (12, 0))
    ],
    ids=str,
)
def test_the_kernels_of_most_trainings(capability):
    """BERT with padding and dropout, and moments in 8 bits."""
    cases = [*attention("bf16", 64, "padding"), *islice(dropout(), 2), next(eight_bits())]
    assert [problem for case in cases for problem in problems(case, capability)] == []
