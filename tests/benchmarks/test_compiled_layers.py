"""The stored figures of compiled layers, from the code that Inductor writes for an absent GPU."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from tests.benchmarks.compiled_layers import CASES, STORED, chosen
from tests.benchmarks.operations import cases

FIGURES = json.loads(STORED.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name == "BERT-large" else pytest.mark.nightly) for name in CASES],
)
def test_a_layer_has_no_more_kernels_and_bytes_than_stored(name: str):
    case, figures = CASES[name], FIGURES[name]
    graphs = chosen(case)
    assert sum(graph.num_kernels for graph in graphs) <= figures["compiled_kernels"]
    assert sum(graph.num_bytes for graph in graphs) / 1e9 <= figures["compiled_gigabytes"] + 0.01
    for graph in graphs:
        # Of masks, one byte an element is kept, and no random words.
        assert all(number <= case.rows * case.length for dtype, number in graph.saved if dtype == torch.int64)
        assert "keep_mask" not in graph.code
        assert "keyed_dropout" not in graph.code


def test_layers_have_the_shapes_of_the_steps_that_they_change():
    """`docs/generate.py` replaces layers of stored steps by stored compiled ones."""
    steps = {case.model: case for case in cases()[::-1] if case.microbatches == 1}  # later rows are longer ones
    for name, case in CASES.items():
        if (step := steps.get(name.partition(",")[0])) is not None:
            assert (case.rows, case.length) == (step.rows, step.length)
            assert step.config.items() <= case.config.items()
        assert FIGURES[name]["layers"] == case.num_layers_of_model
    assert sum(row["layers"] for name, row in FIGURES.items() if name.startswith("ModernBERT")) == 22
