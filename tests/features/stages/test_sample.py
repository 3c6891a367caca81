"""The shipped chain as a user runs, checks, plans and reports it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.features.stages.test_chain import write_chain
from tests.helpers import processes, warm
from trainer.cli import main
from trainer.features.stages import evidence
from trainer.recipe.reading.loading import load_recipe
from trainer.tools.report.runs import read_runs

FOLDERS = ("02-short", "04-long", "05-decay", "06-topics", "07-names", "08-answers")


@pytest.mark.nightly
def test_the_sample_on_two_processes(tmp_path: Path):
    words = ["run", "stages_sample", "--processes", "2", f"checkpoint.folder={tmp_path}"]
    ended = processes.finish(warm.start(words))  # type: ignore[arg-type]
    assert ended.returncode == 0, ended.stderr
    runs = read_runs([tmp_path])
    assert tuple(run.folder.name for run in runs) == FOLDERS
    assert [run.steps_before for run in runs] == [0, 60, 90, 120, 160, 200]
    # Continued stages begin where the one before ended; their first losses are no longer those of random weights.
    short, long = runs[0].metrics.steps, runs[1].metrics.steps
    assert long[0].loss < short[0].loss - 0.5
    assert (tmp_path / "model" / "config.json").is_file()
    assert main(["evaluate", str(tmp_path / "06-topics")]) == 0


def test_a_check_shows_each_stage_and_its_stand_ins(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipe = str(write_chain(tmp_path))
    assert main(["check", recipe, "--quick", "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert {name: one["recipe"]["training"]["max_steps"] for name, one in stages.items()} == {
        "short": 8, "long": 6, "classes": 4
    }  # fmt: skip
    assert "weights and tokenizer of the stage short, which is not done yet" in stages["long"]["unchecked"]
    assert main(["check", recipe, "--quick", "stage=long"]) == 0
    assert "stage     long" in (shown := capsys.readouterr().out)
    assert "stage     short" not in shown


def test_a_stage_begins_with_the_model_of_the_stage_before_or_not_at_all(tmp_path: Path, capsys):
    recipe = str(write_chain(tmp_path))
    first = load_recipe(recipe, is_whole=True).chain.stages["short"].recipe
    evidence.begin(tmp_path / "run" / "01-short", {})
    evidence.finish(tmp_path / "run" / "01-short", evidence.facts_of(first))
    assert main(["run", recipe]) == 2
    assert "starts from the model of short, which is done, but" in capsys.readouterr().err
    assert not list((tmp_path / "run").glob("*/metrics.jsonl"))
    evidence.begin(tmp_path / "run" / "03-classes", {"long": "1"})
    assert main(["run", recipe, "stages.classes.from=short"]) == 2
    assert "began from long, but the recipe now starts it from short; remove" in capsys.readouterr().err
    (tmp_path / "run" / "03-classes" / "stage.json").write_text('{"run": "1"}')
    assert main(["run", recipe]) == 2
    assert "must be an object with `began_from`; restore it, or remove" in capsys.readouterr().err


def test_a_check_names_the_stage_of_a_problem(tmp_path: Path, capsys):
    stages = [{"name": "a"}, {"name": "b", "data": {"max_length": 65}}]
    assert main(["check", str(write_chain(tmp_path, stages))]) == 2
    assert capsys.readouterr().err.rstrip().endswith("(stage `b`)")


@pytest.mark.slow
def test_a_plan_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipe = str(write_chain(tmp_path))
    words = ["plan", recipe, "--gpus", "1xA100-80", "--price-per-gpu-hour", "2"]
    assert main([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["training"]["steps"] == 8 + 6 + 4
    for key in ("hours", "price"):
        assert plan["training"][key] == pytest.approx(sum(one["training"][key] for one in plan["stages"].values()))
    assert main(["plan", recipe, "--gpus", "1x80GiB", "stage=long"]) == 0
    assert main(["plan", recipe, "--gpus", "1x80GiB", "--search"]) == 2
    assert "choose one: stage=short" in capsys.readouterr().err


@pytest.mark.slow
def test_a_check_prepares_the_data_of_each_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["check", str(write_chain(tmp_path))]) == 0
    assert capsys.readouterr().out.count("no problem was found") == 3
