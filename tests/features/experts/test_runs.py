"""Whole runs of the sample with experts, as users start them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import run
from trainer.cli import main
from trainer.recipe.plan import plan_run
from trainer.recipe.reading.loading import load_recipe


def trained(folder: Path, *command: Any) -> dict[str, Any]:
    """Run the sample for three steps, and return the record of its last step."""
    done = run([*command], HOME=str(folder.parent), XDG_CACHE_HOME=str(folder.parent))
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return next(line for line in reversed(lines) if "loss" in line)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_the_sample_trains_alike_under_every_launcher(tmp_path: Path):
    def words(name: str, *others: str) -> list[str]:
        return ["experts_sample", "training.max_steps=3", f"checkpoint.folder={tmp_path / name}", *others]

    program = [sys.executable, "-m", "trainer"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "trainer"]
    four = ("parallel.expert=4", "parallel.strategy=fsdp")
    found = [
        trained(tmp_path / "one", *program, "run", *words("one")),
        trained(tmp_path / "two", *program, "run", *words("two", "parallel.expert=2", "--processes", "2")),
        trained(tmp_path / "four", *program, "run", *words("four", *four, "--processes", "4")),
        trained(tmp_path / "torchrun", *torchrun, "run", *words("torchrun", "parallel.expert=2")),
    ]  # fmt: skip
    losses = [record["loss"] for record in found]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)
    answers = []
    for processes in ("1", "2"):
        asked = tmp_path / "in.jsonl"
        asked.write_text('{"text": "The list of names"}\n{"text": "A module"}\n{"text": "Return"}\n')
        output = tmp_path / f"out{processes}.jsonl"
        inputs = ["--input", str(asked), "--output", str(output), "--processes", processes]
        done = run(
            [*program, "predict", str(tmp_path / "two"), *inputs], HOME=str(tmp_path), XDG_CACHE_HOME=str(tmp_path)
        )
        assert done.returncode == 0, done.stderr
        answers.append([json.loads(line) for line in output.read_text().splitlines()])
    assert len(answers[0]) == 3
    assert answers[0] == answers[1]


def test_the_sample_fits_its_experts():
    recipe = load_recipe("experts_sample", ["parallel.expert=4"]).recipe
    assert plan_run(recipe, 8).layout.ep == 4


def test_a_check_shows_the_share_of_experts(capsys: pytest.CaptureFixture[str]):
    assert main(["check", "experts_sample", "parallel.expert=2", "--processes", "2", "--quick"]) == 0
    assert "(DistributedDataParallel); a rank holds at most 1/2 of the experts\n" in capsys.readouterr().out


@pytest.mark.slow
def test_a_plan_names_the_axes_of_the_exchange_and_of_the_shards(capfd: pytest.CaptureFixture[str]):
    keys = ["parallel.expert=2", "parallel.strategy=hsdp", "parallel.shard=4"]
    assert main(["plan", "experts_sample", *keys, "--gpus", "8xh100"]) == 0
    shown = capfd.readouterr().out
    assert "alltoall_base over ep" in shown
    assert "a rank holds at most 1/2 of the experts\n" in shown
    assert "reduce_scatter_base over dp_shard:" in shown
    assert "reduce_scatter_base over dp_shard_ep:" in shown
