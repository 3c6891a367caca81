"""Masks that compiled layers draw on GPUs: those of the eager function in Inductor's code, and what the code moves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import cpp_builder

from tests.gpu.test_dropout_gpu import CASES
from tests.helpers.interpreting import needs_triton, run_interpreted
from trainer.parallel import dropout
from trainer.parallel.dropout import DropoutKeys, DropoutSite


@pytest.fixture(autouse=True)
def without_earlier_graphs() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@needs_triton
@pytest.mark.slow
def test_in_tritons_interpreter():
    run_interpreted(Path(__file__).with_name("interpreted_masks.py"))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_masks_of_compiled_code_are_those_of_the_eager_function(backend: str, monkeypatch: pytest.MonkeyPatch):
    """In C++ too, if products wrap as those of GPUs do."""
    flags = cpp_builder._get_optimization_cflags

    def wrapping(*arguments: Any, **options: Any) -> tuple[list[str], list[str]]:
        compile_flags, link_flags = flags(*arguments, **options)
        return [*compile_flags, "fwrapv"], link_flags

    monkeypatch.setattr(cpp_builder, "_get_optimization_cflags", wrapping)
    monkeypatch.setattr(dropout, "OVERFLOWS_ARE_UNDEFINED", frozenset())
    sites = [
        (shape, DropoutSite(DropoutKeys(1), "site", **site), torch.arange(shape[0]) * 2**61 - 7)
        for shape, site in CASES.values()
        if not {"flat", "shared_from"} & site.keys()  # those read the keys of a microbatch
    ]

    def masks() -> list[Tensor]:
        return [site.mask(shape, p, keys) for (shape, site, keys), p in zip(sites, cycle([0.1, 1e-9, 0.99999]))]

    for found, expected in zip(torch.compile(masks, fullgraph=True, backend=backend)(), masks(), strict=True):
        assert found.dtype == torch.bool
        assert torch.equal(found.byte(), expected)
