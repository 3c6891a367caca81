"""The memory that each Triton kernel needs on each GPU, from compilations for GPUs that are not there.

A case takes seconds of a CPU, and all of them hours. The most used ones come first, a stored case is not compiled
again until its kernels change, and an interrupted run continues. The selection has all kernels but those of attention
on every GPU, and attention with each type and size of heads on one GPU. From the root of the repository:

    python -m tests.benchmarks.compiled_kernels --selection --store
    python -m tests.benchmarks.compiled_kernels --minutes 60 --store    # further cases
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from itertools import cycle, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from tests.helpers.kernel_compiling import Usage, compiled_for
from trainer.features.adamw_8bit import adamw_8bit_kernels as eight_bit_kernels
from trainer.features.adamw_8bit import fused  # noqa: F401  # registers its operations
from trainer.features.adamw_8bit.dynamic_map import MAPS
from trainer.features.adamw_8bit.scale_blocks import BLOCK
from trainer.features.adamw_kernel import adamw_kernels
from trainer.features.adamw_kernel import operations as adamw_operations
from trainer.features.chunked_head import fused_rows, row_kernels
from trainer.features.kernels import (
    attention_blocks,
    attention_kernels,
    dropout_kernels,
    fused_attention,
    fused_dropout,
    random_kernels,
)
from trainer.features.rotations import fused_rotation, rotary_kernels

STORED = Path(__file__).parents[2] / "docs" / "compiled_kernels.json"
SHARED_KIB = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
"""The most shared memory of a block, by capability: table "Technical Specifications" of NVIDIA's CUDA guide."""
ROWS, HEADS, LENGTH = 2, 4, 512
LONG = 1 << 15  # keys whose dropout masks each kernel draws


class Case(NamedTuple):
    """A call that launches kernels, and the bytes a thread that each may spill."""

    launch: Callable[[], object]
    stack_bytes: int = 0

    def usage(self, capability: tuple[int, int]) -> list[Usage]:
        """Compile the kernels for a GPU, and return what they use."""
        with compiled_for(capability) as found:
            self.launch()
        return found


class Flags(NamedTuple):
    """The arguments of attention that make another kernel."""

    mask: torch.dtype | None = None
    has_bias: bool = False
    causal: bool = False
    dropout: float = 0.1
    joined: bool = False
    window: int | None = None
    length: int = LENGTH  # from 256 on, visible tiles of a boolean mask are listed


FLAGS = {
    "padding": Flags(torch.bool),
    "padding, short rows": Flags(torch.bool, length=128),
    "all keys": Flags(),
    "long rows": Flags(length=LONG),
    "causal": Flags(causal=True),
    "long rows, causal": Flags(causal=True, length=LONG),
    "causal, no dropout": Flags(causal=True, dropout=0.0),
    "flat rows": Flags(joined=True, window=64),
    "flat rows, no window": Flags(joined=True),
    "flat rows, long": Flags(joined=True, length=LONG),
    "flat rows, causal": Flags(joined=True, causal=True),
    "flat rows, causal, no dropout": Flags(joined=True, causal=True, dropout=0.0),
    "flat rows, causal, window": Flags(joined=True, causal=True, window=64),
    "additive mask": Flags(torch.float32),
    "bias": Flags(torch.bool, has_bias=True),
    "bias, short rows": Flags(torch.bool, has_bias=True, length=128),
    "causal bias": Flags(has_bias=True, causal=True),
}
DIMS = (64, 128, 32, 80, 96, 256)
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}


def attend(kind: str, dim: int, flags: Flags, rows: int = ROWS, call: int = 0) -> None:
    """Compute attention and its gradients, those of tensors without values."""
    torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    dtype, joined, length = TYPES[kind], flags.joined, flags.length
    shape = (1, rows * length, HEADS, dim) if joined else (rows, length, HEADS, dim)
    inputs = [torch.empty(shape, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3)]
    mask = bias = None
    if flags.mask is not None:
        mask = torch.empty((rows, 1, length, length), dtype=flags.mask)
    if flags.has_bias:
        bias = torch.empty((1, HEADS, length, length), requires_grad=True)
    tiles = fused_attention.visible_tiles(mask, *inputs) or (None, None)
    row_keys = torch.zeros((call + 1, rows), dtype=torch.int64)[call]
    of_rows = (torch.zeros(rows + 1, dtype=torch.int32), [length] * rows, flags.window) if joined else ()
    output, _ = fused_attention.fused_attention(
        *inputs, row_keys, mask, bias, *tiles, 0.125, flags.dropout, flags.causal, [0, 0, 0], *of_rows
    )
    torch.autograd.grad(output, inputs if bias is None else [*inputs, bias], output.detach())


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


def update(dtype: torch.dtype, has_scalars: bool, beta: float) -> None:
    """Update a list of tensors, with a flag of bad steps and a factor of the gradients or without."""
    weights, words, table = [torch.empty(4096)], torch.zeros(5, dtype=torch.int64), torch.zeros(7, 1, dtype=torch.int64)
    owners, corrections = torch.zeros(4, dtype=torch.int32), torch.empty(3, 1)
    flag, factor = (torch.zeros(()), torch.zeros(())) if has_scalars else (None, None)
    settings = torch.zeros(4, dtype=torch.float64)
    adamw_operations.find_corrections(corrections, torch.zeros(1), words, owners[:1], settings, flag)
    adamw_operations.update(
        words, corrections, table, owners, *[weights] * 5, flag, factor, [beta, 0.999], 1e-8, dtype
    )  # fmt: skip


def drop(
    dtype: torch.dtype, joined: bool, has_residual: bool, first: int, rows: int = ROWS, length: int = LENGTH
) -> None:
    """Drop activations, padded or joined; `first` is the first feature of a tensor rank."""
    tokens = torch.zeros(rows * length, dtype=torch.int64)
    x = torch.empty(1 if joined else rows, rows * length if joined else length, 1024, dtype=dtype)
    places = (tokens, tokens) if joined else (None, None)
    torch.ops.trainer.keyed_dropout(x, tokens[:rows], *places, [0, 0, first], 0.1, dtype, x if has_residual else None)


def lose(dtype: torch.dtype, vocabulary: int) -> None:
    """Compute losses over a vocabulary and their gradients, apart and together."""
    logits, labels = torch.empty((8, vocabulary), dtype=dtype), torch.zeros(8, dtype=torch.int64)
    sizes = (vocabulary, 0, vocabulary)
    found = fused_rows.statistics(logits, labels, *sizes)
    for gradients in (None, torch.empty(8)):
        fused_rows.write_gradients(logits, labels, found, gradients, *sizes)
    fused_rows.statistics_and_gradients(logits, labels, *sizes)


def rotate(dtype: torch.dtype, rounds_products: bool, size: int) -> None:
    """Turn queries and keys of a layer with one tensor for both, and their gradients."""
    q, k, _ = torch.empty(ROWS, LENGTH, 3, 12, size, dtype=dtype).transpose(1, 3).unbind(2)
    cos = torch.empty(1, LENGTH, size, dtype=dtype)
    for is_inverse in (False, True):
        fused_rotation._rotated(q, k, cos, cos, dtype, is_inverse, rounds_products)


def find_keys() -> None:
    """Compute the keys of the rows of a microbatch."""
    keys = torch.zeros((26, 1), dtype=torch.int64)
    fused_dropout.row_keys(keys, keys.view(-1))


def _grid() -> Iterator[tuple[str, Case]]:
    yield "keys of rows", Case(find_keys)
    for name, flags in (
        ("a residual", (False, True, 0)),
        ("flat rows", (True, True, 0)),
        ("a part", (False, False, 6)),
    ):
        for kind in ("bf16", "fp16", "fp32"):
            yield f"dropout, {kind}, {name}", Case(partial(drop, TYPES[kind], *flags))
    for kind, has_scalars, beta in (
        ("bf16", True, 0.9),
        ("fp16", True, 0.9),
        ("bf16", False, 0.9),
        ("bf16", True, 0.4),
    ):
        more = "" if has_scalars else ", no flag"
        yield f"32-bit AdamW, {kind}, beta {beta}{more}", Case(partial(update, TYPES[kind], has_scalars, beta))
    for kind, rounds_products, size in (
        ("bf16", False, 64),
        ("fp16", False, 64),
        ("fp32", False, 64),
        ("bf16", True, 128),
        ("fp32", True, 128),
        ("bf16", True, 80),
    ):
        how = "products rounded" if rounds_products else "in fp32"
        yield f"rotation, {kind}, heads of {size}, {how}", Case(partial(rotate, TYPES[kind], rounds_products, size))
    for width, kind in product((BLOCK, 64), ("fp32", "bf16")):
        # 8 bytes by an update of whole rows of 64 on 10.0
        yield f"8-bit AdamW, {kind}, rows of {width}", Case(partial(update_in_eight_bits, width, TYPES[kind]), 8)
    for kind, vocabulary in (("bf16", 30522), ("fp16", 30522), ("fp32", 30522), ("bf16", 1000)):
        yield f"loss over a vocabulary, {kind}, {vocabulary} tokens", Case(partial(lose, TYPES[kind], vocabulary))
    for dim, kind, name in product(DIMS, TYPES, FLAGS):
        stack_bytes = attention_blocks.STACK_BYTES[torch.finfo(TYPES[kind]).bits]
        yield f"attention, {kind}, heads of {dim}, {name}", Case(partial(attend, kind, dim, FLAGS[name]), stack_bytes)


GRID = dict(_grid())
"""A case for each call that makes another kernel; those of most trainings come first."""


def _selection() -> Iterator[tuple[str, tuple[int, int]]]:
    others = [name for name in GRID if not name.startswith("attention")]
    yield from product(others, SHARED_KIB)
    for (dim, kind), flags in zip(product(DIMS, TYPES), cycle(FLAGS), strict=False):  # each of the flags once or twice
        yield f"attention, {kind}, heads of {dim}, {flags}", SELECTED


SELECTED = (9, 0)
SELECTION = list(_selection())
"""Cases with each kernel, and attention with each type and size of heads on one GPU."""


def problems(name: str, capability: tuple[int, int]) -> Iterator[str]:
    """Yield a message for each kernel of a case that needs more memory than it may."""
    case, found = GRID[name], GRID[name].usage(capability)
    assert found, f"{name} launches no kernel"
    for usage in found:
        if usage.stack_bytes > case.stack_bytes:
            yield f"{name}: {usage} spills more than {case.stack_bytes} bytes"
        if usage.shared_bytes > SHARED_KIB[capability] * 1024:
            yield f"{name}: {usage} needs more shared memory than {SHARED_KIB[capability]} KiB"


def _compile(name: str, capability: tuple[int, int]) -> tuple[str, list[int]]:
    found = GRID[name].usage(capability)
    most = [max(usage.stack_bytes for usage in found), max(usage.shared_bytes for usage in found)]
    return f"{'.'.join(map(str, capability))}, {name}", most


_MODULES = {
    "attention": (random_kernels, attention_blocks, attention_kernels),
    "32-bit": (adamw_kernels,),
    "vocabulary": (row_kernels,),
    "rotation": (rotary_kernels,),
    "others": (random_kernels, dropout_kernels, eight_bit_kernels),
}
"""The modules of the kernels of a case, by a word in its name."""


def _kind(name: str) -> str:
    """Return the key of a case in `_MODULES`."""
    return next((kind for kind in _MODULES if kind in name), "others")


def _version(kind: str) -> str:
    """Return a digest of all that changes the code of the kernels of a case."""
    digest = hashlib.sha256(triton.__version__.encode())
    for module in _MODULES[kind]:
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.hexdigest()[:16]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no case after so many minutes")
    parser.add_argument("--workers", type=int, default=2, help="compile so many cases at a time")
    parser.add_argument("--names", default="", help="only cases with this text in their names")
    parser.add_argument("--selection", action="store_true", help="only the selection")
    parser.add_argument("--store", action="store_true", help=f"write the figures into docs/{STORED.name}")
    options = parser.parse_args(arguments)
    end, versions = time.monotonic() + options.minutes * 60, {kind: _version(kind) for kind in _MODULES}
    found: dict[str, dict[str, Any]] = {"versions": versions, "most": {}}
    if STORED.exists():
        stored = json.loads(STORED.read_text(encoding="utf-8"))
        for name, most in stored["most"].items():
            kind = _kind(name)
            if stored["versions"].get(kind) == versions[kind]:
                found["most"][name] = most
    left = [
        (name, capability)
        for name, capability in (SELECTION if options.selection else product(GRID, SHARED_KIB))
        if options.names in name and f"{'.'.join(map(str, capability))}, {name}" not in found["most"]
    ]
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        running = {pool.submit(_compile, *one) for one in left[: options.workers]}
        left = left[options.workers :]
        while running:
            future = next(as_completed(running))
            running.remove(future)
            name, most = future.result()
            found["most"][name] = most
            print(f"{name}: spills {most[0]} bytes a thread, {most[1]:,} bytes of shared memory", flush=True)
            if options.store:
                STORED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            if left and time.monotonic() < end:
                running.add(pool.submit(_compile, *left.pop(0)))
    print(f"{len(found['most'])} of {len(GRID) * len(SHARED_KIB)} cases are compiled")


if __name__ == "__main__":
    main()
