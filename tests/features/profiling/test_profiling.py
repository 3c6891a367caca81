"""Profiles of steps: a trace of each rank, and a table of operations, from runs as a user starts them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.helpers import processes, warm
from tests.helpers.tiny_run import write_tiny_run
from trainer.base.errors import ExitCode, RecipeError
from trainer.cli import main
from trainer.recipe.reading.loading import load_recipe


def test_each_rank_writes_a_trace_of_the_steps(tmp_path: Path):
    recipe = write_tiny_run(tmp_path, logging={"every": "1 step", "to": ["console"], "profile": {"steps": [2, 3]}})
    words = ("--processes", "2", "training.max_steps=4", "evaluation.every=null")
    ended = processes.finish(warm.start(["run", recipe, *words]))
    assert ended.returncode == 0, ended.stderr
    folder = tmp_path / "run" / "profile"
    assert sorted(file.name for file in folder.iterdir()) == [
        "operations.txt", "rank-00000.json.gz", "rank-00001.json.gz",
    ]  # fmt: skip
    for rank in range(2):
        events = json.loads(gzip.decompress((folder / f"rank-{rank:05d}.json.gz").read_bytes()))["traceEvents"]
        # Two steps of one microbatch: a fused optimizer updates the weights once in each.
        assert sum("_fused_adamw_" in event["name"] and event.get("cat") == "cpu_op" for event in events) % 2 == 0
        assert sum(event["name"].startswith("Optimizer.step#") for event in events) == 2
    table = (folder / "operations.txt").read_text().splitlines()
    assert len(table) == 11
    assert all(line.strip() in ended.stdout for line in table)
    assert "steps 2 to 3: 2 traces for https://ui.perfetto.dev in" in " ".join(ended.stdout.split())


def test_steps_that_never_run_are_named(tmp_path: Path):
    recipe = write_tiny_run(tmp_path, logging={"every": "1 step", "to": ["console"], "profile": {"steps": [5, 6]}})
    words = ("training.stop_at_step=2", "evaluation.every=null")
    ended = processes.finish(warm.start(["run", recipe, *words]))
    assert ended.returncode == 75, ended.stderr
    assert "`logging.profile.steps` is 5 to 6, but none of these steps ran" in ended.stdout
    assert not (tmp_path / "run" / "profile").exists()


def test_a_link_at_the_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipe = write_tiny_run(tmp_path, logging={"to": ["console"], "profile": {"steps": [1, 1]}})
    (tmp_path / "outside").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").symlink_to(tmp_path / "outside")
    assert main(["run", str(recipe), "training.max_steps=2", "evaluation.every=null"]) == ExitCode.USER
    assert "`checkpoint.folder` must hold no link where the run writes" in " ".join(capsys.readouterr().err.split())
    assert not any((tmp_path / "outside").iterdir())


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([4, 2], r"must be the first and the last step, but is \[4, 2\]; use \[2, 4\]"),
        ([9, 9], "begins at step 9, but `training.max_steps` is 8"),
    ],
)
def test_other_steps_are_refused(tmp_path: Path, steps: list[int], message: str):
    recipe = write_tiny_run(tmp_path, logging={"profile": {"steps": steps}})
    with pytest.raises(RecipeError, match=message):
        load_recipe(str(recipe))
