"""A growing batch is the same under every layout, and over a stream."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers import processes
from tests.helpers.tiny_run import write_tiny_run
from tests.training.test_run import metrics

KEYS = {
    "training": {
        "max_steps": 9, "global_batch_size": 8, "micro_batch_size": 4, "max_grad_norm": None,
        "batch_size_warmup": {"start": 4, "increment": 2, "steps": 4},
    },
    "data": {"group_by_length": False},
    "evaluation": {"every": "5 steps", "verify_export": 0},
}  # fmt: skip


def curve(folder: Path, ranks: int, **sections: object) -> tuple[list[int], list[float], list[float]]:
    recipe = write_tiny_run(folder, **{**KEYS, **sections})
    command = [sys.executable, "-m", "trainer", "run", recipe, "--processes", str(ranks)]
    ended = processes.run(command)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    steps = metrics(recipe).steps
    return [step.samples for step in steps], [step.loss for step in steps], [step.grad_norm for step in steps]


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_layouts_have_one_curve(tmp_path: Path):
    samples, losses, norms = curve(tmp_path / "one", 1)
    for name, sections in (
        ("fsdp", {"parallel": {"strategy": "fsdp"}, "training": {**KEYS["training"], "micro_batch_size": 1}}),
        ("stages", {"parallel": {"pipeline": {"stages": 2}}}),
    ):
        found = curve(tmp_path / name, 2, **sections)
        assert found[0] == samples
        assert found[1] == pytest.approx(losses, rel=1e-5)
        assert found[2] == pytest.approx(norms, rel=1e-4)


@pytest.mark.nightly
@pytest.mark.usefixtures("warm_python")
def test_under_deepspeed_and_over_a_stream(tmp_path: Path):
    samples, losses, _ = curve(tmp_path / "one", 1)
    found = curve(tmp_path / "zero1", 2, parallel={"strategy": "zero1"})
    assert found[0] == samples
    assert found[1] == pytest.approx(losses, rel=1e-5)
    streamed = {
        "data": {**KEYS["data"], "streaming": True, "shuffle_window": 16},
        "task": {"labels": ["a", "b", "c"]},
    }
    one, two = curve(tmp_path / "stream", 1, **streamed), curve(tmp_path / "streams", 2, **streamed)
    assert one[0] == two[0] == samples
    assert two[1] == pytest.approx(one[1], rel=1e-5)
