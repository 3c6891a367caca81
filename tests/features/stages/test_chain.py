"""Stages that run one after another, go on after a stop, and run in the ranks of a launcher."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from pathlib import Path

import pytest

from tests.helpers import processes, turns, warm
from tests.helpers.tiny_run import write_tiny_run

MLM = {"type": "masked_lm", "text": "text", "metrics": ["accuracy"]}
STAGES = [
    {"name": "short"},
    {"name": "long", "start": "continued", "training": {"max_steps": 6}, "data": {"max_length": 24}},
    {
        "name": "classes",
        "task": {"type": "sequence_classification", "text": "text", "metrics": ["accuracy"]},
        "training": {"max_steps": 4},
    },
]


def write_chain(folder: Path, stages=STAGES, **sections) -> Path:
    sections = {"evaluation": {"every": None}, "checkpoint": {"every": "2 steps", "asynchronous": False}, **sections}
    return write_tiny_run(folder, task=MLM, stages=stages, **sections)


def finished(*words: object, code: int = 0, **variables: str) -> str:
    ended = processes.finish(warm.start(["run", *words], **variables))  # type: ignore[arg-type]
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def losses(run: Path) -> dict[str, list[float]]:
    """The losses of each stage by its folder; those of a resumed run replace those that it repeats."""
    found = {}
    for name in sorted(file.parent.name for file in run.glob("0*/metrics.jsonl")):
        of_steps: dict[int, float] = {}
        for line in (run / name / "metrics.jsonl").read_text().splitlines():
            if "loss" in (row := json.loads(line)):
                of_steps[row["step"]] = row["loss"]
        found[name] = [of_steps[step] for step in sorted(of_steps)]
    return found


def reference(tmp_path_factory) -> Path:
    """The folder of a run without disturbance on one process."""

    def make() -> str:
        recipe = write_chain(tmp_path_factory.mktemp("chain"))
        finished(recipe)
        return str(recipe.parent / "run")

    return Path(turns.once("stages", make))


def in_ranks(recipe: Path, *words: object, code: int = 0) -> list[str]:
    """Run the recipe in two ranks of a launcher that sets variables, and return their outputs."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    started = []
    for rank in "01":
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        started.append(warm.start(["run", recipe, *words], MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **place))
    ended = [processes.finish(one) for one in started]  # type: ignore[arg-type]
    assert [one.returncode for one in ended] == [code, code], [one.stderr for one in ended]
    return [one.stdout + one.stderr for one in ended]


@pytest.mark.slow
def test_the_ranks_of_a_launcher_do_all_stages_and_go_on_after_a_stop(tmp_path, tmp_path_factory):
    recipe = write_chain(tmp_path)
    in_ranks(recipe, "stages.long.training.stop_at_step=3", code=75)
    assert not (tmp_path / "run" / "02-long" / "model").exists()
    first, second = in_ranks(recipe, "parallel.strategy=fsdp")
    assert "stage 2 of 3: long" in first
    assert "stage 1 of 3" not in first
    assert "stage" not in second
    expected = losses(reference(tmp_path_factory))
    for name, values in losses(tmp_path / "run").items():
        assert values == pytest.approx(expected[name], rel=2e-5), name
    in_ranks(recipe)  # all is done, so the ranks have nothing to meet for


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_torchrun_does_all_stages(tmp_path, tmp_path_factory):
    recipe = write_chain(tmp_path)
    ended = processes.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "trainer",
            "run",
            recipe,
        ]
    )
    assert ended.returncode == 0, ended.stderr
    expected = losses(reference(tmp_path_factory))
    for name, values in losses(tmp_path / "run").items():
        assert values == pytest.approx(expected[name], rel=2e-5), name


@pytest.mark.slow
def test_a_changed_stage_is_refused_once_it_is_done(tmp_path, tmp_path_factory):
    shutil.copytree(reference(tmp_path_factory), tmp_path / "run", symlinks=True)
    recipe = write_chain(tmp_path)
    assert "nothing to do" in finished(recipe)
    text = finished(recipe, "stages.long.training.max_steps=5", code=2)
    assert "the stage long is done, but its training has changed: `training.max_steps` was 6 and is 5" in text
    assert f"remove {tmp_path}/run/02-long and the folders of the stages after it" in text
    finished(recipe, "parallel.strategy=fsdp", "evaluation.every=null", "logging.every=2 steps")
    shutil.rmtree(tmp_path / "run" / "01-short")
    text = finished(recipe, code=2)
    assert "the stage long in" in text
    assert "began from another run of short" in text


@pytest.mark.slow
def test_a_continued_stage_equals_a_longer_run(tmp_path):
    """With a constant rate, and all rows in each batch, so that their order does not count."""
    same = {
        "model": {"dropout": 0.0},
        "data": {"group_by_length": False},
        "evaluation": {"every": None},
        "schedule": {"name": "constant", "warmup": 0},
        "optimizer": {"learning_rate": 1e-2},
    }
    rows = {"global_batch_size": 40, "micro_batch_size": 20}
    task = {"type": "sequence_classification", "text": "text", "metrics": ["accuracy"]}
    long = write_tiny_run(tmp_path / "long", **same, task=task, training={**rows, "max_steps": 10})
    finished(long)
    lines = (tmp_path / "long" / "run" / "metrics.jsonl").read_text().splitlines()
    expected = [row["loss"] for row in map(json.loads, lines) if "loss" in row]
    found = {}
    for start in ("continued", "fresh"):
        stages = [{"name": "one"}, {"name": "two", "start": start, "training": {"max_steps": 5}}]
        recipe = write_tiny_run(tmp_path / start, **same, task=task, training={**rows, "max_steps": 5}, stages=stages)
        finished(recipe)
        folders = [tmp_path / start / "run" / name / "metrics.jsonl" for name in ("01-one", "02-two")]
        found[start] = [
            row["loss"] for file in folders for row in map(json.loads, file.read_text().splitlines()) if "loss" in row
        ]
    assert found["continued"] == pytest.approx(expected, rel=1e-5)
    assert found["fresh"][:6] == pytest.approx(expected[:6], rel=1e-5)
    assert found["fresh"][6:] != pytest.approx(expected[6:], rel=1e-3)
