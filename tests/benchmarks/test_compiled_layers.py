"""The stored figures of compiled layers, from the code that Inductor writes for an absent GPU."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from tests.benchmarks.compiled_layers import CASES, STORED, chosen, main
from tests.benchmarks.operations import cases

FIGURES = json.loads(STORED.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "BERT-large" else pytest.mark.nightly)
        for name in CASES
        if "without padding" not in name
    ],
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


@pytest.mark.nightly
def test_a_plan_with_counted_kernels(capsys: pytest.CaptureFixture[str]):
    """The planned speed of `docs/benchmarks.md`, from the kernels of layers without padding."""
    words = ["modernbert_base_pretraining", "model.tokenizer=none", "training.batch_size_warmup=null"]
    main(["--names", "96 rows", "--plan", "H100", *words])
    shown = capsys.readouterr().out
    found = [float(number.replace(",", "")) for number in re.findall(r"([\d,]+) tokens/s", shown)]
    assert found == pytest.approx([278_641, 327_692], rel=0.01)


def test_layers_have_the_shapes_of_the_steps_that_they_change():
    """`docs/generate.py` replaces layers of stored steps by stored compiled ones."""
    steps = {step.name: step for step in cases()}
    for name, case in CASES.items():
        model, _, *more = [*name.split(", "), ""]
        of_layer = ", ".join([model, case.task, "bf16", "one process", *filter(None, more)])
        if (step := steps.get(of_layer)) is not None:
            assert (case.rows, case.length) == (step.rows, step.length)
            assert step.config.items() <= case.config.items()
            assert step.keys == case.keys
        assert FIGURES[name]["layers"] == case.num_layers_of_model
    assert sum(row["layers"] for name, row in FIGURES.items() if name.startswith("ModernBERT")) == 22 * 3
