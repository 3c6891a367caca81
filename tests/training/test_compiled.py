"""A whole run with compiled layers; the commands of `docs/compile.md` run with the compiler of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.tiny_run import write_tiny_run
from trainer.base.errors import ExitCode
from trainer.models import compiled
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.reading.loading import load_recipe
from trainer.tools.run_metrics import read_metrics
from trainer.training.run import run

STEPS = (
    "training.max_steps=3",
    'logging.to=["console"]',
    "evaluation.every=null",
    "checkpoint.every=null",
    "logging.every=1 step",
)


def losses(folder: Path, *overrides: str) -> list[float]:
    recipe = write_tiny_run(folder)
    assert run(load_recipe(str(recipe), [*STEPS, *overrides]), LaunchEnvironment("none")) == ExitCode.DONE
    return [record.loss for record in read_metrics(folder / "run" / "metrics.jsonl").steps]


@pytest.mark.slow
def test_a_compiled_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    expected = losses(tmp_path / "one")
    capsys.readouterr()
    assert losses(tmp_path / "other", "compile=true") == pytest.approx(expected, rel=1e-5)
    shown = " ".join("".join(capsys.readouterr()).split())
    assert "layers are compiled after the first microbatch" in shown
    assert "with 0 graph breaks" in shown
    torch._dynamo.reset()
