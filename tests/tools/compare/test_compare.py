"""Comparisons: their recipes, their turns, their numbers, and a real one with layouts that fail."""

from __future__ import annotations

import csv
import json
import os
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers import warm
from tests.helpers.browser import CURVE, needs_browser, open_page
from tests.helpers.figures import figures_of
from tests.helpers.processes import finish
from tests.helpers.tiny_run import write_tiny_run
from tests.observe.samples import run_info, step_record
from tests.parity import cases
from trainer.base.errors import ExitCode, RecipeError, TrainerError, UsageError
from trainer.observe.metrics_file import MetricsFile
from trainer.recipe.reading.loading import ResolvedRecipe, load_recipe
from trainer.recipe.registered import optimizer_sections
from trainer.tools.compare import turns
from trainer.tools.compare.comparison_page import write_page
from trainer.tools.compare.contestants import contestants, kind_of
from trainer.tools.compare.result_table import table
from trainer.tools.compare.trial_results import results, warm_up
from trainer.tools.compare.turns import Comparison
from trainer.tools.run_metrics import read_metrics
from trainer.tools.tolerances import TOLERANCES


def names(
    words: list[str], processes: int = 2, file: Path | None = None, gpus: int = 0, recipe: str = "bert_sample"
) -> list[str]:
    return [one.name for one in contestants(recipe, words, file, processes, gpus)[1]]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("`a` must be 1\nmore", "`a` must be 1"),
        ("rank 0 failed:\n  the disk is full\nmore", "rank 0 failed: the disk is full"),
        ("rank 0 failed:\nTraceback (most recent call last):\n  x\nValueError: y", "ValueError: y"),
        (None, ""),
    ],
)
def test_a_failure_has_its_reason_in_one_line(text: str | None, line: str):
    assert turns.first_line(text) == line


class TestContestants:
    def test_on_two_ranks(self):
        assert names([]) == [
            "recipe",
            "strategy=fsdp",
            "strategy=zero1",
            "strategy=zero2",
            "strategy=zero3",
            "stages=2",
            "tensor=2",
            "tensor=2 sequence=true",
            "context=2",
            "activation_checkpointing=full",
            "precision=bf16",
            "precision=fp16",
        ]

    def test_one_rank_leaves_nothing_to_cut_and_two_gpus_add_data_parallel(self):
        assert names([], processes=1) == ["recipe", "activation_checkpointing=full", "precision=bf16", "precision=fp16"]
        assert "tensor=2 sequence=true context=2" in names([], processes=4)
        assert "strategy=dp" in names([], processes=2, gpus=2)
        (dp,) = [one for one in contestants("bert_sample", [], None, 2, 2)[1] if one.name == "strategy=dp"]
        assert dp.processes == 1

    def test_only_layouts_that_the_model_allows(self):
        assert "tensor=2 sequence=true" not in (found := names([], recipe="experts_sample"))
        assert {"tensor=2", "expert=2"} <= set(found)
        odd = names(["model.config.num_experts=3"], recipe="experts_sample")
        assert "tensor=2" in odd
        assert "expert=2" not in odd

    def test_keys_of_the_user_stay(self):
        found = names(["precision=bf16", "parallel.strategy=fsdp"], processes=4)
        assert found[0] == "recipe"
        assert not any("strategy" in name or "precision" in name for name in found)
        assert len(found) == len(set(found))

    def test_values_make_a_grid(self):
        common, found = contestants(
            "bert_sample",
            ["optimizer.learning_rate=1e-5,2e-5", "precision=fp32,bf16", 'task.metrics=["accuracy", "f1"]'],
            None,
            1,
            0,
        )
        assert common == ['task.metrics=["accuracy", "f1"]']
        assert [one.overrides for one in found] == [
            (f"optimizer.learning_rate={rate}", f"precision={precision}")
            for rate in ("1e-5", "2e-5")
            for precision in ("fp32", "bf16")
        ]

    def test_a_file_has_a_layout_a_line(self, tmp_path: Path):
        file = tmp_path / "layouts"
        file.write_text("recipe  # as it is\n\nparallel.strategy=fsdp activation_checkpointing=full\n")
        assert names([], file=file) == ["recipe", "strategy=fsdp activation_checkpointing=full"]
        file.write_text("parallel.strategy=fsdp\n")
        assert names([], file=file) == ["recipe", "strategy=fsdp"], "the recipe is the reference"

    @pytest.mark.parametrize(
        ("text", "problem"), [("fsdp", "line 1 of .* holds 'fsdp'"), ("", "no layout"), ('a="b', "quotation")]
    )
    def test_a_wrong_file_is_refused(self, text: str, problem: str, tmp_path: Path):
        (tmp_path / "layouts").write_text(text)
        with pytest.raises(UsageError, match=problem):
            names([], file=tmp_path / "layouts")

    def test_a_wrong_key_is_an_error_of_the_recipe(self):
        with pytest.raises(RecipeError, match=r"training\.epoch"):
            names(["training.epoch=1"])

    @pytest.mark.parametrize(
        ("words", "kind"),
        [
            (["parallel.tensor=2", "activation_checkpointing=full", "training.micro_batch_size=3"], "layout"),
            (["data.num_workers=1", "evaluation.every=null", "logging.every=3 steps"], "layout"),
            (["parallel.strategy=fsdp", "precision=bf16"], "precision"),
            (["optimizer.learning_rate=1e-5"], "training"),
            (["data.max_length=64"], "training"),
            (["training.global_batch_size=96"], "training"),
        ],
    )
    def test_the_keys_decide_the_comparison(self, words: list[str], kind: str):
        first = load_recipe("bert_sample").recipe
        assert kind_of(load_recipe("bert_sample", words).recipe, first) == kind


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Trainings that only write records; returns the overrides of each, in order."""
    done: list[str] = []

    def train(resolved: ResolvedRecipe, number: int, job: Any, place: Any = None) -> int:
        recipe = resolved.recipe
        done.append(f"{recipe.parallel.strategy} {recipe.precision}")
        if recipe.precision == "bf16":
            raise TrainerError("the device lacks bf16\nbuy another")
        file = MetricsFile()
        folder = Path(recipe.checkpoint.folder)
        file.start(run_info(folder, layout=recipe.parallel.strategy))
        wrong = 1 + 3e-5 * (recipe.parallel.strategy == "zero1")
        for step in range(1, (recipe.training.stop_at_step or 0) + 1):
            file.step(
                step_record(
                    step,
                    loss=2.0 * (wrong if step > 7 else 1),
                    step_seconds=9.0 if step <= 2 else 0.1 * step + done.index(done[-1]),
                    samples_per_second=float(step),
                    rank_memory_bytes=(len(done), 10 - len(done)),
                )
            )
        file.close()
        return ExitCode.STOPPED

    monkeypatch.setattr(turns, "run_on_fresh_ranks", train)
    return done


LAYOUTS = ["parallel.strategy=ddp,fsdp,zero1"]


def comparison(folder: Path, words: list[str] = LAYOUTS, steps: int = 10) -> Comparison:
    common, found = contestants("bert_sample", words, None, 2, 0)
    return Comparison("bert_sample", common, found, steps, folder)


SHARES = '{"compute": %s, "communication": 0.5, "rest": 0.0, "sent_bytes": %s}'
DAMAGED = [
    *(("metrics.jsonl", content) for content in (None, "", "x", "[1]", '{"step": 1}', '{"step": 1, "eval": 1}')),
    *(("probe-0.json", content) for content in (None, "", "[]", "{}", "{" * 50_000, SHARES % ('"</script>"', 1))),
    *(("probe-0.json", SHARES % numbers) for numbers in (("NaN", 1), ("1e400", 1), (-1.0, 1), (0.5, "1" * 5000))),
]


class TestTurns:
    def test_the_second_turn_is_in_reverse_and_complete_turns_are_kept(self, trained: list[str], tmp_path: Path):
        comparison(tmp_path).run(str)
        assert [word.split()[0] for word in trained] == ["ddp", "fsdp", "zero1", "zero1", "fsdp", "ddp"]
        again = comparison(tmp_path)
        again.run(str)
        assert len(trained) == 6
        assert all(len(trial.turns) == 2 for trial in again.trials)
        comparison(tmp_path, ["parallel.strategy=ddp,zero3"]).run(str)
        assert [word.split()[0] for word in trained[6:]] == ["zero3", "zero3"]
        comparison(tmp_path, steps=9).run(str)
        assert len(trained) == 14

    def test_a_damaged_turn_is_trained_again(self, trained: list[str], tmp_path: Path):
        layouts = ["parallel.strategy=ddp,fsdp"]
        comparison(tmp_path, layouts).run(str)
        for name, content in DAMAGED:
            before, file = len(trained), next(tmp_path.rglob("complete.json")).with_name(name)
            file.unlink(missing_ok=True)
            os.mkfifo(file) if content is None else file.write_text(content)
            again = comparison(tmp_path, layouts)
            again.run(str)
            assert len(trained) == before + 1, (name, content)
        write_page(results(again.trials), tmp_path, {"recipe": "x"}, is_cpu=True)

    def test_other_versions_or_another_source_train_again(
        self, trained: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        for name in ("versions", "source_digest"):
            comparison(tmp_path).run(str)
            before = len(trained)
            monkeypatch.setattr(turns, name, lambda: "another")
            comparison(tmp_path).run(str)
            assert len(trained) == before + 6

    def test_a_failed_layout_is_a_row_and_the_rest_goes_on(self, trained: list[str], tmp_path: Path):
        lines: list[str] = []
        one = comparison(tmp_path, ["precision=fp32,bf16", "training.epochs=1"])
        one.run(lines.append)
        assert trained == ["ddp fp32", "ddp bf16", "ddp fp32"]
        found = results(one.trials)
        assert [result.is_complete for result in found] == [True, False]
        shown = "\n".join(table(found, is_cpu=True, width=1000))
        assert "failed    precision=bf16: the device lacks bf16" in shown

    def test_keys_that_only_other_runs_need_are_left_out(self, trained: list[str], tmp_path: Path):
        of_runs = ["evaluation.best=accuracy", "evaluation.patience=3", 'logging.to=["wandb"]', "logging.project=mine"]
        one = comparison(tmp_path, ["training.micro_batch_size=12,24", *of_runs])
        one.run(str)
        assert [trial.reason for trial in one.trials] == [None, None]

    def test_an_interrupted_turn_is_trained_again(
        self, trained: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        train: Any = turns.run_on_fresh_ranks

        def interrupted(resolved: ResolvedRecipe, number: int, job: Any, place: Any = None) -> int:
            if len(trained) == 3:
                steps = resolved.recipe.training.model_copy(update={"stop_at_step": 4})
                recipe = resolved.recipe.model_copy(update={"training": steps})
                resolved = replace(resolved, recipe=recipe)
            code: int = train(resolved, number, job)
            return code

        monkeypatch.setattr(turns, "run_on_fresh_ranks", interrupted)
        first = comparison(tmp_path)
        with pytest.raises(KeyboardInterrupt):
            first.run(str)
        assert [len(trial.turns) for trial in first.trials] == [1, 1, 1]
        comparison(tmp_path).run(str)
        assert [word.split()[0] for word in trained] == ["ddp", "fsdp", "zero1", "zero1", "zero1", "fsdp", "ddp"]


class TestResults:
    def test_numbers_equal_the_records(self, trained: list[str], tmp_path: Path):
        one = comparison(tmp_path)
        one.run(str)
        ddp, fsdp, zero = results(one.trials)
        timed = [0.1 * step for step in range(3, 11)] * 2
        assert warm_up(10) == 2
        assert ddp.step_seconds is not None
        assert ddp.step_seconds[1] == pytest.approx(statistics.median(timed))
        assert fsdp.step_seconds is not None
        assert fsdp.step_seconds[1] == pytest.approx(1 + statistics.median(timed))
        assert ddp.samples_per_second == statistics.median(range(3, 11))
        assert ddp.rank_memory_bytes == (6, 9)
        assert (ddp.is_reference, fsdp.is_reference) == (True, False)
        assert fsdp.likeness is not None
        assert (fsdp.likeness.loss, fsdp.likeness.leaves) == (0.0, None)
        assert zero.likeness is not None
        assert (zero.likeness.loss, zero.likeness.leaves) == (pytest.approx(3e-5), 8)
        shown = "\n".join(table([ddp, fsdp, zero], is_cpu=True, width=1000))
        assert "beyond the tolerance from step 8" in shown
        assert "1 of 2 learn the same" in shown
        assert "strategy=ddp has the shortest step" in shown
        near = [replace(one, rank_memory_bytes=(size,)) for one, size in ((ddp, 1030), (fsdp, 1000), (zero, 1100))]
        tie = "strategy=fsdp and, within the noise, strategy=ddp have the least memory"
        for is_cpu, least in ((True, tie), (False, "strategy=fsdp has the least memory")):
            assert least in "\n".join(table(near, is_cpu, width=1000))
        assert "on a CPU the memory is of the process" in shown
        narrow = list(table([ddp, fsdp, zero], is_cpu=True, width=60))
        parts = [line for line in narrow if line.startswith("strategy=fsdp ")]
        assert max(map(len, parts)) <= 60
        assert sorted(" ".join(parts).replace("strategy=fsdp", "").split()) == sorted(
            next(line for line in shown.splitlines() if line.startswith("strategy=fsdp ")).split()[1:]
        )

    def test_another_training_is_shown_by_its_losses(self, trained: list[str], tmp_path: Path):
        one = comparison(tmp_path, ["optimizer.learning_rate=1e-5,2e-5"])
        one.run(str)
        found = results(one.trials)
        assert [result.kind for result in found] == ["layout", "training"]
        assert found[1].likeness is None
        assert "loss 2 to 2" in "\n".join(table(found, is_cpu=True, width=1000))

    def test_tolerances_equal_the_parity_tests(self):
        of_optimizers = {name: keys.tolerances for name, keys in optimizer_sections().items() if keys.tolerances}
        expected = {name: (limit.loss, limit.grad_norm) for name, limit in cases.TOLERANCES.items()}
        assert expected == {**TOLERANCES, **of_optimizers}


@pytest.mark.slow
@needs_browser
def test_a_browser_draws_the_page_without_errors_and_requests(trained: list[str], tmp_path: Path):
    one = comparison(tmp_path, ["parallel.strategy=ddp,fsdp,zero1", "model.dropout=0.1"])
    one.run(str)
    write_page(results(one.trials), tmp_path, {"recipe": "<b>"}, is_cpu=True)
    opened = open_page(tmp_path / "compare.html", tmp_path)
    assert (opened.console, opened.requests) == ([], [])
    assert len(CURVE.findall(opened.dom)) == 3 + 3 + 2 + 2
    assert opened.dom.count(">strategy=zero1</tspan>") >= 2, "beside bars"
    assert opened.dom.count("> strategy=zero1</button>") == 4, "in legends"
    assert "Comparison of &lt;b&gt;" in opened.dom


@pytest.mark.slow
def test_layouts_on_two_processes(tmp_path: Path):
    recipe, output = write_tiny_run(tmp_path), tmp_path / "compared"
    layouts = tmp_path / "layouts"
    layouts.write_text("recipe\nparallel.strategy=fsdp\nparallel.tensor=3\nmodel.config.hidden_size=7\n")
    words = ["compare", recipe, "--layouts", layouts, "--processes", "2", "--steps", "5", "-o", output]
    ended = finish(warm.start([*words, "model.dropout=0", "training.micro_batch_size=2"]))
    assert ended.returncode == 0, ended.stderr
    assert "failed    tensor=3: `parallel.tensor` must divide the 2 processes" in ended.stdout
    assert len(figures_of(output / "compare.html")["peak memory of the process of each rank"]) == 2
    found = json.loads((output / "compare.json").read_text())["results"]
    assert [result["reason"] is None for result in found] == [True, True, False, False]
    for result in found[:2]:
        files = sorted(output.glob(f"turns/{result['name']}-*/?/metrics.jsonl"))
        steps = [record for file in files for record in read_metrics(file).steps[1:5]]
        assert len(steps) == 8
        assert result["step_seconds"][1] == statistics.median(record.step_seconds for record in steps)
        assert len(result["rank_memory_bytes"]) == 2
        assert result["plan"]["peak_bytes"] > 0
        shares = result["shares"]
        assert shares["sent_bytes"] == pytest.approx(result["plan"]["sent_bytes"], rel=0.01), (
            "ranks also agree in each step"
        )
        assert shares["compute"] + shares["communication"] + shares["rest"] == pytest.approx(1)
        assert min(shares["compute"], shares["communication"]) > 0
    assert found[1]["likeness"]["leaves"] is None
    assert found[1]["likeness"]["loss"] < TOLERANCES["fp32"][0]
    assert not list(output.glob("turns/**/step-*")), "a measurement saves nothing"
    assert len(list(csv.DictReader((output / "compare.csv").open()))) == 4
    left = [process for process in psutil.process_iter(["cmdline"]) if str(output) in (process.info["cmdline"] or [])]
    assert not left
