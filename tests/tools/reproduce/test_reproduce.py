"""The expected metrics of a recipe: their rule, the interval and the verdict, and runs that go on."""

from __future__ import annotations

import json
import math
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from scipy.stats import ttest_1samp

from tests.helpers import warm
from tests.helpers.processes import finish
from tests.helpers.tiny_run import write_tiny_run
from trainer.base.errors import ExitCode, RecipeError, TrainerError, UsageError
from trainer.checkpoint.identity import identity
from trainer.recipe.reading.files import read_file
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.reading.shipped import shipped_recipes
from trainer.tools.compare.seeds import SeededRecipe
from trainer.tools.reproduce.reproduce import Reproduced, ReproduceRequest, reproduce

EXPECTED = {"accuracy": [0.0, 1.0], "source": "this test", "seeds": 2}
SAMPLES = [
    name
    for name, path in shipped_recipes().items()
    if "_sample" in name and '"expects"' in path.read_text(encoding="utf-8")
]


class TestTheKey:
    @pytest.mark.parametrize(
        ("values", "problem"),
        [
            (
                {"accurcy": [0, 1]},
                r"`expects.accurcy` is no metric of the task sequence_classification; .* accuracy, f1",
            ),
            ({"accuracy": [1, 0]}, r"`expects.accuracy` must be two numbers, the lower one first"),
            ({"accuracy": 0.9}, r"`expects.accuracy` must be two numbers"),
            ({"accuracy": [0, 1], "seeds": 0}, r"`expects.seeds` must be a whole number of at least 1"),
            ({"accuracy": [0, 1], "source": " "}, r"`expects.source` must be a text"),
            ({"source": "a table"}, r"`expects` names no metric"),
        ],
    )
    def test_wrong_values_are_refused(self, tmp_path: Path, values: dict, problem: str):
        with pytest.raises(RecipeError, match=problem):
            load_recipe(str(write_tiny_run(tmp_path, expects={"source": "a table", **values})))
        with pytest.raises(RecipeError, match="has no `source`"):
            load_recipe(str(write_tiny_run(tmp_path, expects={"accuracy": [0, 1]})))

    def test_it_is_not_inherited_and_no_part_of_the_training(self, tmp_path: Path):
        base = write_tiny_run(tmp_path, expects=EXPECTED)
        (tmp_path / "own.json").write_text(json.dumps({"extends": base.name, "name": "own"}))
        with_it, without = load_recipe(str(base)).recipe, load_recipe(str(tmp_path / "own.json")).recipe
        assert (with_it.expects, without.expects) == (EXPECTED, None)
        assert identity(with_it, "rows") == identity(without, "rows")

    def test_shipped_recipes_expect_metrics_that_they_evaluate(self):
        found = {}
        for name, file in shipped_recipes().items():
            # Other recipes have none, and one of stages is not a training by itself.
            if "expects" in read_file(file)[0].members:
                recipe = load_recipe(name).recipe
                found[name] = set(recipe.expects or {}) - {"source", "seeds"}
                assert found[name] <= {*recipe.task.metrics, "loss"}, name
        assert sum(map(bool, found.values())) >= 10


class TestTheVerdict:
    def test_the_interval_is_that_of_a_t_test(self):
        values = [0.90, 0.93, 0.91]
        value, half = Reproduced("accuracy", 0, 1, values).measured
        interval = ttest_1samp(values, 0).confidence_interval(0.95)
        assert (value - half, value + half) == pytest.approx((interval.low, interval.high))

    @pytest.mark.parametrize(
        ("values", "verdict", "is_inside"),
        [
            ([0.90, 0.901], "inside", True),
            ([0.86, 0.94], "inside, but not all of its error", True),
            ([0.9], "inside; one seed shows no error", True),
            ([0.80, 0.92], "outside, but within the error", False),
            ([0.70, 0.701], "outside", False),
            ([0.99], "outside", False),
            ([math.nan, 0.9], "outside", False),
        ],
    )
    def test_the_mean_decides(self, values: list[float], verdict: str, is_inside: bool):
        found = Reproduced("accuracy", 0.87, 0.93, values)
        assert (found.verdict, found.is_inside) == (verdict, is_inside)


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({}, "`expects` of .* is null"),
        ({"expects": {"f1": [0, 1], "source": "x"}}, "`expects.f1` needs a metric that is not evaluated"),
        ({"expects": EXPECTED, "training": {"stop_at_step": 2}}, "`training.stop_at_step` of tiny is set"),
        ({"expects": EXPECTED, "evaluation": {"every": None}}, "`evaluation.every` of tiny is null"),
    ],
)
def test_a_recipe_without_a_result_is_refused(tmp_path: Path, sections: dict, problem: str):
    recipe = write_tiny_run(tmp_path, **sections)
    with pytest.raises(UsageError, match=problem):
        reproduce(ReproduceRequest(str(recipe), (), None, 1, tmp_path / "out"), print)


def test_damaged_records_are_trained_again_and_failures_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recipe, starts = write_tiny_run(tmp_path, expects=EXPECTED), list[int]()

    def trained(one: SeededRecipe, seed: int, place: Path) -> None:
        starts.append(seed)
        if seed == 43:
            raise UsageError("no such data; name others")
        (place / "metrics.jsonl").write_text('{"step": 1, "eval": {"accuracy": 0.5}}\n')

    monkeypatch.setattr(SeededRecipe, "_train", trained)
    request = ReproduceRequest(str(recipe), (), None, 1, tmp_path / "out")
    damages: list[Callable[[Path], object]] = [lambda _: None, lambda file: file.write_text("x\n"), Path.unlink]
    for number, damage in enumerate(damages):
        for file in tmp_path.glob("out/seeds/*/42/metrics.jsonl"):
            damage(file)
        assert reproduce(request, print) == ExitCode.FAILED
        assert starts.count(42) == number + 1
    found = json.loads((tmp_path / "out" / "reproduce.json").read_text())
    assert found["seeds"] == {"42": {"accuracy": 0.5}}
    assert found["reason"] == "no such data; name others"
    (tmp_path / "out" / "reproduce.html").unlink()
    (tmp_path / "out" / "reproduce.html").mkdir()
    with pytest.raises(TrainerError, match=r"`--output` is .*, which cannot be written"):
        reproduce(request, print)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.usefixtures("warm_python")
def test_a_sample_is_reproduced(tmp_path: Path, name: str):
    words = ["reproduce", name, "--seeds", "1", "--processes", "1", "--output", tmp_path]
    ended = finish(warm.start(words), 580)
    assert ended.returncode == 0, ended


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_a_command_that_was_killed_goes_on_where_it_was(tmp_path: Path):
    recipe = write_tiny_run(
        tmp_path, training={"max_steps": 60}, checkpoint={"every": "5 steps"}, expects=EXPECTED,
        evaluation={"every": "20 steps"},
    )  # fmt: skip
    whole = ["reproduce", recipe, "--output", tmp_path / "whole", "--processes", "1"]
    assert finish(warm.start(whole), 240).returncode == 0
    command = ["reproduce", recipe, "--output", tmp_path / "out", "--processes", "1"]
    for number in (signal.SIGINT, signal.SIGKILL):
        child = warm.start(command)
        _wait_for(tmp_path / "out", steps=10 if number == signal.SIGINT else 30)
        child.send_signal(number)
        finish(child, 120)
    ended = finish(warm.start(command), 240)
    assert ended.returncode == 0, ended
    lines = [json.loads(line) for file in sorted(tmp_path.glob("out/seeds/*/*/metrics.jsonl"))
             for line in file.read_text().splitlines()]  # fmt: skip
    resumed = [line["run"]["resumed_from"] for line in lines if "run" in line]
    assert len(resumed) >= 4
    assert sum(step is None for step in resumed) == 2, "one start of each seed from the first step"
    found, reference = (json.loads((tmp_path / name / "reproduce.json").read_text()) for name in ("out", "whole"))
    assert found["seeds"] == reference["seeds"]
    assert re.search(r"accuracy +[\d.]+ ± [\d.]+ +0 to 1 +inside", ended.stdout)
    assert not [*tmp_path.glob("out/seeds/*/*/*/")], "checkpoints and models are deleted"
    # Complete runs are read, and other expectations are another verdict.
    values = json.loads(recipe.read_text()) | {"expects": {"accuracy": [1.5, 2.0], "source": "nobody"}}
    recipe.write_text(json.dumps(values))
    judged = finish(warm.start([*command, "--seeds", "2"]), 120)
    assert judged.returncode == 1
    assert "outside" in judged.stdout
    assert json.loads((tmp_path / "out" / "reproduce.json").read_text())["seeds"] == reference["seeds"]


def _wait_for(folder: Path, steps: int) -> None:
    """Wait until the runs below a folder have logged some steps."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        if sum(file.read_text().count('"loss"') for file in folder.glob("seeds/*/*/metrics.jsonl")) >= steps:
            return
        time.sleep(0.05)
    raise AssertionError("the runs have not logged so many steps")
