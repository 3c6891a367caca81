"""Runs that rewind are the same under every layout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.features.spikes.planted import write_planted_run
from tests.features.spikes.test_rewind import ROW, logged
from tests.helpers import processes
from tests.training.test_run import metrics


def run(folder: Path, ranks: int, **parallel: Any) -> tuple[list[Any], list[float]]:
    recipe = write_planted_run(folder, ROW, parallel=parallel)
    ended = processes.run([sys.executable, "-m", "trainer", "run", recipe, "--processes", str(ranks)])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    jumps = [(line["step"], [value for key, value in line.items() if "rewound" in key]) for line in logged(recipe)]
    assert jumps
    return jumps, [step.loss for step in metrics(recipe).steps]


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_layouts_have_one_curve(tmp_path: Path):
    jumps, losses = run(tmp_path / "one", 1)
    found = run(tmp_path / "fsdp", 2, strategy="fsdp")
    assert found[0] == jumps
    assert found[1] == pytest.approx(losses, rel=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("parallel", [{"strategy": "ddp"}, {"strategy": "zero1"}, {"strategy": "zero3"}, {"tensor": 2}])
@pytest.mark.usefixtures("warm_python")
def test_other_layouts(tmp_path: Path, parallel: dict[str, Any]):
    jumps, losses = run(tmp_path / "one", 1)
    found = run(tmp_path / "other", 2, **parallel)
    assert found[0] == jumps
    assert found[1] == pytest.approx(losses, rel=1e-4)
