"""Where the time of a run went: planted causes are the largest ones, and changes are measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import warm
from tests.helpers.processes import finish
from tests.helpers.tiny_run import write_tiny_run
from tests.helpers.training import tiny_recipe
from tests.observe.samples import end_record, run_info, step_record
from tests.tools.slowed_run import shape_traffic
from trainer.cli import main
from trainer.observe.meter import of_slowest_reader
from trainer.observe.metrics_file import METRICS_FILE_NAME, MetricsFile
from trainer.observe.records import SampledStep
from trainer.tools.report.time_parts import time_parts
from trainer.tools.run_metrics import read_metrics
from trainer.tools.step_profile import combined

SLOW, NIGHTLY = pytest.mark.slow, pytest.mark.nightly
STEP = {"micro_batch_size": 4, "global_batch_size": 8, "max_steps": 16}


def explained(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["why", str(folder), "--json", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert sum(found["seconds"].values()) == pytest.approx(found["total"])
    return found


def _may_shape_traffic() -> bool:
    process = warm.start([], program="tests.tools.test_why:shape")
    return finish(process, 60).returncode == 0


def shape(words: list[str]) -> int:
    try:
        shape_traffic()
    except Exception:  # no rights, no `tc`, no such kernel module
        return 1
    return 0


@pytest.mark.parametrize(
    ("cause", "ranks", "words", "largest"),
    [
        pytest.param("disk", 1, [], "rows", marks=SLOW),
        pytest.param("none", 1, ["evaluation.every=1 step", "training.max_steps=30"], "evaluation", marks=SLOW),
        pytest.param("none", 1, ["training.micro_batch_size=1"], "host", marks=SLOW),
        pytest.param("rank", 2, [], "waiting", marks=SLOW),
        pytest.param("link", 2, [], "communication", marks=SLOW),
        pytest.param("widths", 1, ["compile=true", "training.max_steps=24"], "compilation", marks=NIGHTLY),
        pytest.param("rank of zero", 2, ["parallel.strategy=zero2"], "waiting", marks=NIGHTLY),
        pytest.param("rank", 2, ["parallel.tensor=2"], "waiting", marks=NIGHTLY),
        pytest.param("rank", 2, ["parallel.pipeline.stages=2"], "waiting", marks=NIGHTLY),
    ],
    ids=[
        "slow disk",
        "evaluation at each step",
        "batches of one row",
        "slow rank",
        "slow link",
        "a width for each batch",
        "slow rank under zero",
        "slow tensor rank",
        "slow stage",
    ],
)
def test_a_planted_cause_is_the_largest(
    cause: str, ranks: int, words: list[str], largest: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    if cause == "link" and not _may_shape_traffic():
        pytest.skip("needs root, network namespaces and tc")
    recipe = write_tiny_run(tmp_path, training=STEP, evaluation={"every": None})
    command = [cause, "run", recipe, "--processes", ranks, *words]
    ended = finish(warm.start(command, program="tests.tools.slowed_run:main"))
    assert ended.returncode == 0, ended.stderr
    found = explained(tmp_path / "run", capsys)
    spent = {part: time for part, time in found["seconds"].items() if part not in ("computing", "sampling", "start")}
    assert max(spent, key=spent.__getitem__) == largest  # a loaded machine starts slowly
    if cause == "widths":
        assert found["changes"][0]["override"] == "data.pad_to=16"  # all texts in one width
    if largest == "waiting":
        assert found["slowest_rank"] == 1
    if cause == "disk":
        assert found["changes"][0]["override"] == "data.num_workers=2"
    if largest == "host":
        assert "microbatches of 1 row" in found["cause"]
        assert found["changes"][0]["override"].startswith("training.micro_batch_size=")


@SLOW
def test_a_change_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipe = write_tiny_run(tmp_path, training=STEP, evaluation={"every": "1 step"})
    assert main(["run", str(recipe)]) == 0
    found = explained(tmp_path / "run", capsys, "--verify", "--steps", "8")
    measured = {one["override"].partition("=")[0]: one for one in found["verified"]}
    assert measured["evaluation.every"]["after"] < measured["evaluation.every"]["before"]
    assert main(["why", str(tmp_path / "run")]) == 0
    assert "change evaluation.every=" in capsys.readouterr().out  # a loaded machine starts slowly


def test_parts_of_two_starts_add_up(tmp_path: Path):
    seconds = {"rows": 1.0, "step": 6.0, "device": 1.0, "compilation": 2.0}
    info = run_info(tmp_path, start_seconds=5.0)
    for number in range(2):
        file = MetricsFile()
        file.start(run_info(tmp_path, start_seconds=5.0, resumed_from=1) if number else info)
        first = 1 + number
        for step in range(first, first + 2):
            sample = SampledStep(3.0, 1.0, 1.0, 2.0, 1)
            file.step(step_record(step, seconds=seconds, padding=0.25, mfu=0.5, sample=sample))
        if number:
            file.end(end_record(tmp_path, parts={"evaluation": 4.0}, seconds=40.0))
        file.close()
    parts = time_parts(read_metrics(tmp_path / METRICS_FILE_NAME))
    assert parts is not None
    steps = 3 * 7.0  # the second step of the first start is repeated: its 10 seconds are lost
    assert parts.seconds == pytest.approx(
        {
            "computing": steps * 3 / 7,
            "host": steps / 7,
            "communication": steps / 7,
            "waiting": steps * 2 / 7,
            "rows": 3.0,
            "compilation": 6.0,
            "evaluation": 4.0,
            "start": 5.0,
            "restarts": 15.0,
            "end": 40 - 5 - 20 - 4,
        }
    )
    assert (parts.slowest, parts.padding, parts.mfu, parts.largest) == (1, 0.25, 0.5, "restarts")
    assert parts.padded == pytest.approx(9 / 4)


def test_the_slowest_rank_waits_least():
    found = combined([(1.0, 2.0, 0.5), (2.5, 0.5, 0.5), (1.0, 2.25, 0.25)])
    assert found == SampledStep(computing=1.0, host=0.375, communication=0.5, waiting=1.625, slowest=1)
    assert combined([(1.0, 0.0, 0.5)]) == SampledStep(1.0, 0.5, 0.0, 0.0, 0)
    assert combined([(0.0, 0.0, 0.0)]) is None


def test_other_ranks_wait_for_the_rows_of_one():
    assert of_slowest_reader({"step": 3.0, "rows": 1.0}, [1.0, 2.5]) == {"step": 1.5, "rows": 2.5}


def test_metrics_without_times_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = MetricsFile()
    file.start(run_info(tmp_path))
    file.step(step_record(1))
    file.close()
    assert main(["why", str(tmp_path)]) == 2
    assert "must hold the times of steps" in capsys.readouterr().err


def test_a_copied_folder_without_its_data_is_only_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The data of the recipe is not on this machine, and `--verify` writes through no link."""
    recipe = json.loads(tiny_recipe(evaluation={"every": None}).model_dump_json())
    file, seconds = MetricsFile(), {"rows": 9.0, "step": 2.0}
    file.start(run_info(tmp_path / "run", recipe=recipe, world_size=1))
    for step in (1, 2):
        file.step(step_record(step, seconds=seconds))
    file.close()
    assert explained(tmp_path / "run", capsys)["largest"] == "rows"
    assert [path.name for path in (tmp_path / "run").iterdir()] == [METRICS_FILE_NAME]
    (tmp_path / "run" / "why").symlink_to(tmp_path)
    assert main(["why", str(tmp_path / "run"), "--verify"]) == 2
    assert not (tmp_path / "recipe.json").exists()
    for place, value in (("seconds", {"rows": -1e308, "step": 1e308}), ("padding", 1e308), ("tokens", 10**400)):
        lines = (tmp_path / "run" / METRICS_FILE_NAME).read_text().splitlines()
        lines[1] = json.dumps(json.loads(lines[1]) | {place: value})
        (tmp_path / "run" / METRICS_FILE_NAME).write_text("\n".join(lines))
        assert main(["why", str(tmp_path / "run"), "--json"]) in (0, 2)
    text = (tmp_path / "run" / METRICS_FILE_NAME).read_text()
    (tmp_path / "run" / METRICS_FILE_NAME).write_text(text.replace('"world_size": 1', '"world_size": 0'))
    assert main(["why", str(tmp_path / "run")]) == 2


def test_a_run_that_is_slower_than_its_plan_has_the_note_of_its_guard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    recipe = json.loads(tiny_recipe(evaluation={"every": None}, cuda_graphs=False).model_dump_json())
    file = MetricsFile()
    file.start(run_info(tmp_path, recipe=recipe, world_size=1, device="NVIDIA H100 80GB HBM3"))
    for step in (10, 20):
        file.step(
            step_record(step, seconds={"step": 1.0, "device": 0.01}, step_seconds=1.0, tokens_per_second=16 * 320.4)
        )
    file.close()
    (note,) = (note for note in explained(tmp_path, capsys)["notes"] if "planned speed" in note)
    assert note.startswith("a step takes 1 s, and 0.0")
    assert note.endswith('the GPU waits for the host; set `cuda_graphs` to "auto"')
