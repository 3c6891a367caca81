"""Every Triton kernel compiles for every GPU, fits its shared memory and spills no more than its table states.

Triton compiles for a GPU that is not there: these tests launch nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch

triton = pytest.importorskip("triton")

from tests.benchmarks.compiled_kernels import (  # noqa: E402  # imports Triton
    DIMS,
    FLAGS,
    GRID,
    SELECTION,
    SHARED_KIB,
    TYPES,
    attend,
    drop,
    problems,
)
from tests.helpers.kernel_compiling import specialised_for  # noqa: E402
from trainer.features.adamw_8bit.scale_blocks import BLOCK  # noqa: E402
from trainer.features.kernels.attention_blocks import of_capability  # noqa: E402


@pytest.fixture(autouse=True)
def kept_kernels(pytestconfig: pytest.Config) -> Iterator[None]:
    """Compile no kernel twice, over all workers and runs, and leave the precision of products as it was."""
    allow_tf32 = torch.backends.cuda.matmul.allow_tf32
    with triton.knobs.cache.scope():
        # Triton finds kernels by their source, its version and the target.
        triton.knobs.cache.dir = str(pytestconfig.cache.mkdir("compiled_kernels"))
        yield
    torch.backends.cuda.matmul.allow_tf32 = allow_tf32


@pytest.mark.parametrize("name", ["padding", "causal", "flat rows", "bias"])
def test_batches_of_other_sizes_need_no_other_kernels(name):
    """A compilation takes seconds. One kernel reads aligned strides, one all others."""
    with specialised_for((9, 0)) as found:
        for length in (17, 20, 32, 33, 48, 64, 100, 256, 257, 384, 511):
            for rows in (1, 2, 3, 8, 16):
                for call in (0, 1):  # its keys may lie at any place of a table
                    attend("bf16", 64, FLAGS[name]._replace(length=length), rows, call)
                drop(torch.bfloat16, FLAGS[name].joined, False, 0, rows, length)
    # From 256 keys on, the visible tiles are listed.
    most = {"padding": 4, "bias": 4}.get(name, 2)
    assert {"forward_kernel", "query_gradient_kernel", "key_gradient_kernel", "dropout_kernel"} <= found.keys()
    assert len(found["dropout_kernel"]) == 1
    assert {kernel: len(keys) for kernel, keys in found.items() if len(keys) > most} == {}


@pytest.mark.parametrize("name", ["padding", "flat rows", "bias"])
def test_heads_with_strides_that_are_not_aligned_have_the_kernels_of_larger_ones(name):
    """Heads of 72 spilled 808 bytes, where those of 80 spill 48."""
    kernels = []
    for dim in (72, 80):
        with specialised_for((8, 0)) as found:
            attend("bf16", dim, FLAGS[name])
        kernels.append(found)
    assert kernels[0] == kernels[1]


def test_the_selection_has_each_type_and_size_of_heads_and_all_flags():
    attention = [name.split(", ", 3)[1:] for name, _ in SELECTION if name.startswith("attention")]
    assert [(int(heads.removeprefix("heads of ")), kind) for kind, heads, _ in attention] == [*product(DIMS, TYPES)]
    assert {flags for *_, flags in attention} == FLAGS.keys()
    assert {name for name, _ in SELECTION} >= {name for name in GRID if not name.startswith("attention")}


@pytest.mark.nightly
@pytest.mark.parametrize("capability", SHARED_KIB, ids=str)
@pytest.mark.parametrize("name", GRID)
def test_every_kernel(name, capability):
    assert list(problems(name, capability)) == []


@pytest.mark.parametrize(
    "capability",
    [
        pytest.param(one, marks=pytest.mark.slow if one in ((8, 0), (9, 0)) else pytest.mark.nightly, id=str(one))
        for one in SHARED_KIB
    ],
)
def test_the_kernels_of_most_trainings(capability):
    """BERT with padding and dropout on every GPU; on one, moments in 8 bits and packed rows of Llama, too."""
    names = ["attention, bf16, heads of 64, padding, short rows"]
    if capability == (9, 0):
        names += ["keys of rows", "dropout, bf16, a residual", f"8-bit AdamW, fp32, rows of {BLOCK}"]
        names += ["32-bit AdamW, bf16, beta 0.9", "loss over a vocabulary, bf16, 30522 tokens"]
        names += ["attention, bf16, heads of 64, padding", "attention, bf16, heads of 128, flat rows, causal"]
    assert [problem for name in names for problem in problems(name, capability)] == []


@pytest.mark.parametrize(
    ("capability", "like"), [((8, 7), (8, 0)), ((10, 3), (10, 0)), ((11, 0), (8, 0)), ((12, 1), (12, 0))]
)
def test_other_gpus_have_blocks_that_fit_them(capability, like):
    for dtype, dim, has_floats in product((torch.bfloat16, torch.float32), (64, 128, 256), (False, True)):
        blocks = [of_capability(one, dtype, dim, has_floats) for one in (capability, like)]
        assert blocks[0] == blocks[1]
