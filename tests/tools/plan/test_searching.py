"""Searches: the fastest layouts, the fewest GPUs, the largest batch and length; and plans of pipelines."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.helpers.forking import forking
from tests.helpers.training import TINY_DECODERS, TINY_TASKS
from tests.tools.plan.measured import LENGTH, SMALL_BERT, recipe_of
from trainer.base.errors import TrainerError, UsageError
from trainer.cli import main
from trainer.recipe.plan import plan_run
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.schedules import SCHEDULES
from trainer.tools.plan import searching
from trainer.tools.plan.hardware import parse_devices
from trainer.tools.plan.ledger import PARAMETERS
from trainer.tools.plan.pipeline_plan import plan_steps
from trainer.tools.plan.recipe_plan import Choice, plan_recipe, traffic_by_axis
from trainer.tools.plan.searching import LayoutSearch, Tried, write_extending
from trainer.tools.plan.simulated_step import plan_step
from trainer.tools.plan.timing import BUBBLE, COMMUNICATION, COPIES, OPTIMIZER


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file, rows = tmp_path / "recipe.json", tmp_path / "rows.csv"
    rows.write_text("text,label\ngood,1\n")
    keys = {
        "data": {"source": "files", "train": str(rows), "max_length": LENGTH},
        "training": {"max_steps": 4, "global_batch_size": 8, "micro_batch_size": 4},
        "model": {"config": {**SMALL_BERT, "num_hidden_layers": 2}, "tokenizer": "none"},
    }
    file.write_text(recipe_of(keys).model_dump_json(exclude_defaults=True))
    return file


def answer(capsys: pytest.CaptureFixture[str], *words: Any) -> dict[str, Any]:
    assert main(["plan", *map(str, words), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.slow
def test_the_fastest_layouts_are_planned_and_written(recipe: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    file = tmp_path / "chosen" / "fast.json"
    file.parent.mkdir()
    words = [recipe, "--gpus", "2xA100-40", "precision=bf16", "activation_checkpointing=none"]
    found = answer(capsys, *words, "--search", "--write", file)
    seconds = [choice["time"]["seconds"]["likely"] for choice in found["choices"]]
    assert seconds == sorted(seconds)
    assert {str(choice["layout"]) for choice in found["choices"]} == {"dp_shard 2", "dp_replicate 2", "tp 2", "pp 2"}
    assert found["left_out"] == 0
    written = load_recipe(str(file)).recipe
    assert written.precision == "bf16"
    (size,) = [word for word in found["choices"][0]["overrides"] if word.startswith("training.micro_batch_size=")]
    assert size == f"training.micro_batch_size={written.training.micro_batch_size}"
    again = answer(capsys, file, "--gpus", "2xA100-40")
    assert again["time"]["seconds"]["likely"] == seconds[0]
    with pytest.raises(UsageError, match=r"must name a new file, but .* exists"):
        write_extending(file, str(recipe), ())


@pytest.mark.parametrize(
    ("name", "words"), [("best", "end with .json or .yaml or .yml"), ("no/a.json", "make the folder")]
)
def test_a_recipe_to_write_is_refused_before_the_search(
    recipe: Path, tmp_path: Path, name: str, words: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["plan", str(recipe), "--gpus", "2xA100-40", "--search", "--write", str(tmp_path / name)]) == 2
    assert words in capsys.readouterr().err


def test_a_search_keeps_given_keys_and_ends_after_its_plans(recipe: Path):
    devices = parse_devices("4xA100-40")
    found = LayoutSearch(str(recipe), ["parallel.tensor=2", "parallel.strategy=ddp"], devices, most_plans=1).fastest()
    (choice,) = found.choices
    assert choice.made.plan.layout.tp == 2
    assert found.left_out > 0
    assert not any(word.startswith(("parallel.tensor", "parallel.strategy")) for word in choice.overrides)


@pytest.mark.slow
def test_ranks_share_long_rows_where_nothing_else_fits(recipe: Path):
    words = ["parallel.strategy=ddp", "parallel.tensor=1", "parallel.pipeline.stages=1", "data.max_length=4096"]
    words += ["model.config.max_position_embeddings=4096"]
    one_row = ["training.micro_batch_size=1", "activation_checkpointing=full"]
    devices = parse_devices("2xA100-40")
    alone, shared = (
        plan_recipe(load_recipe(str(recipe), [*words, *one_row, f"parallel.context={ranks}"]), devices).needed
        for ranks in (1, 2)
    )
    small = replace(devices, memory_bytes=(alone + shared) // 2)
    (choice,) = LayoutSearch(str(recipe), words, small).fastest().choices
    assert choice.overrides[:2] == ("activation_checkpointing=full", "parallel.context=2")
    whole = [*words, "activation_checkpointing=none"]
    assert LayoutSearch(str(recipe), whole, devices).fastest().choices[0].made.plan.layout.cp == 1
    assert not LayoutSearch(str(recipe), [*words, *one_row, "parallel.context=1"], small).fastest().choices
    short = LayoutSearch(str(recipe), [*words, *one_row], small, length=2048).fastest().choices
    assert {one.made.plan.layout.cp for one in short} == {1}


@pytest.mark.slow
def test_offload_is_searched_where_nothing_else_fits(recipe: Path):
    words = ["parallel.strategy=fsdp", "parallel.tensor=1", "parallel.pipeline.stages=1"]
    one_row = ["training.micro_batch_size=1", "activation_checkpointing=full"]
    devices = parse_devices("2xA100-40")
    without, offloaded = (
        plan_recipe(load_recipe(str(recipe), [*words, *one_row, f"parallel.offload={offload}"]), devices)
        for offload in ("none", "parameters")
    )
    assert without.time
    assert offloaded.time
    assert without.time.parts[COPIES] == 0 < offloaded.time.parts[COPIES]
    # Each step moves the shards to the device for the forward and the backward pass, and the gradients to the host.
    shards = offloaded.steps[0].host[PARAMETERS]
    assert 2 * shards <= offloaded.steps[0].totals.moved <= 3 * shards * offloaded.plan.batch.num_microbatches
    small = replace(devices, memory_bytes=(without.needed + offloaded.needed) // 2)
    words += one_row
    (choice,) = LayoutSearch(str(recipe), words, small).fastest().choices
    assert "parallel.offload=parameters" in choice.overrides
    kept = LayoutSearch(str(recipe), [*words, "parallel.offload=none"], small).fastest()
    assert not kept.choices


@pytest.mark.slow
def test_several_processes_find_the_result_of_one(recipe: Path, monkeypatch: pytest.MonkeyPatch):
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # torch then marks the steps of its subclasses twice
    words = ["parallel.strategy=ddp", "training.micro_batch_size=4"]
    alone = LayoutSearch(str(recipe), words, parse_devices("2xA100-40"), most_plans=2).fastest()
    monkeypatch.setattr(searching, "_LAYOUTS_OF_A_WORKER", 1)
    monkeypatch.setattr(searching, "available_cores", lambda: 2)
    monkeypatch.setattr(searching, "get_context", lambda _: forking())  # its processes have imported torch
    with mock.patch.object(searching, "plan_recipe", side_effect=AssertionError("planned in this process")):
        found = LayoutSearch(str(recipe), words, parse_devices("2xA100-40"), most_plans=2).fastest()
    assert [(choice.overrides, choice.seconds, choice.made.needed) for choice in found.choices] == [
        (choice.overrides, choice.seconds, choice.made.needed) for choice in alone.choices
    ]
    assert found.failures == alone.failures
    assert found.left_out == alone.left_out > 0


def choice_of(search: LayoutSearch, layout: tuple[str, ...], seconds: float) -> Choice:
    """Return a layout with a plan of these seconds: a tenth each for the optimizer and for exposed communication."""
    recipe = load_recipe(search._recipe, [*search._overrides, *layout]).recipe
    plan = plan_run(recipe, search._devices.number * search._nodes, search._devices.number)
    parts = {OPTIMIZER: seconds / 10, COMMUNICATION: seconds / 10, BUBBLE: 0.0}
    made: Any = SimpleNamespace(plan=plan, time=SimpleNamespace(likely=seconds, parts=parts))
    return Choice(layout, made)


class TestVariants:
    def test_they_are_all_that_combines(self, recipe: Path):
        search = LayoutSearch(str(recipe), [], parse_devices("4xA100-40"), nodes=2)
        found = {(v.row.name, v.schedule) for v in search._variants()}
        assert {name for name, schedule in found if not schedule} == {"zero1", "zero2", "zero3"}
        assert {name for name, schedule in found if schedule} == {"ddp", "fsdp", "hsdp"}
        assert {schedule for _, schedule in found} == {"", *SCHEDULES} - {"gpipe"}
        given = LayoutSearch(str(recipe), ["parallel.strategy=zero2", "parallel.tensor=1"], parse_devices("4xA100-40"))
        assert {v.row.name for v in given._variants()} <= {"zero2"}
        assert not any("tensor" in word for v in given._variants() for word in v.overrides)

    def test_bounds_come_from_plans_with_the_same_cuts(self, recipe: Path):
        search = LayoutSearch(str(recipe), [], parse_devices("4xA100-40"))
        choices = [choice_of(search, (), 1.0), choice_of(search, ("parallel.pipeline.stages=2",), 1.0)]
        found = {(v.row.name, v.schedule, v.cuts): search._bound(v, choices) for v in search._variants()}
        assert found["zero1", "", ()] == pytest.approx(0.9)  # it waits for the collectives of ddp
        assert found["zero3", "", ()] == pytest.approx(0.8)  # it may send less than ddp
        two = ("parallel.pipeline.stages=2",)
        bubble = SCHEDULES["interleaved_1f1b"].bubble(2, 2, 4)
        assert found["ddp", "interleaved_1f1b", two] == pytest.approx(0.8 / (1 - bubble))
        assert found["zero1", "", ("parallel.tensor=2",)] == 0.0

    def test_variants_that_cannot_be_fastest_are_not_planned(self, recipe: Path):
        search = LayoutSearch(str(recipe), [], parse_devices("8xA100-40"), most_plans=1000)
        tried: list[tuple[str, ...]] = []

        def attempt(layout: tuple[str, ...]) -> Tried:
            tried.append(layout)
            cut = sum(map(int, re.findall(r"(?:tensor|stages)=(\d)", " ".join(layout))))
            try:
                return Tried(layout, [choice_of(search, layout, 1.0 + cut)], "", 1)
            except TrainerError:  # too few rows for the stages
                return Tried(layout, [], "it has too few rows", 0)

        with (
            mock.patch.object(search, "_try", attempt),
            mock.patch.object(searching, "available_cores", return_value=1),
        ):
            found = search.fastest()
        limit = found.choices[9].seconds
        assert 0 < found.too_slow < len(search._variants())
        assert found.left_out == 0
        assert any("zero1" in " ".join(layout) for layout in tried)
        skipped = [v for v in search._variants() if v.overrides not in tried]
        assert len(skipped) == found.too_slow
        assert all(search._bound(v, found.choices) >= limit for v in skipped)


class _Dying(ProcessPoolExecutor):
    def submit(self, *_: Any, **__: Any) -> Any:
        return super().submit(os._exit, 1)


def test_a_killed_process_of_a_search_is_an_error(recipe: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(searching, "_LAYOUTS_OF_A_WORKER", 1)
    monkeypatch.setattr(searching, "available_cores", lambda: 2)
    monkeypatch.setattr(searching, "ProcessPoolExecutor", _Dying)
    with pytest.raises(TrainerError, match="one of the 2 processes of the search was killed"):
        LayoutSearch(str(recipe), [], parse_devices("2xA100-40"), most_plans=2).fastest()


def test_a_search_without_speeds_is_refused(recipe: Path):
    with pytest.raises(UsageError, match="no speed is known for 80GiB"):
        LayoutSearch(str(recipe), [], parse_devices("2x80GiB")).fastest()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--search", "--rows", "9"], "`--rows` is 9"),
        (["--search", "--timeline", "-"], "`--timeline` is -"),
        (["--search", "--price-per-gpu-hour", "0"], "`--price-per-gpu-hour` is 0"),
        (["--also", "precision"], "`--also` is precision"),
    ],
)
def test_options_without_a_meaning_are_refused(
    recipe: Path, capsys: pytest.CaptureFixture[str], words: list[str], named: str
):
    assert main(["plan", str(recipe), "--gpus", "2xA100-40", *words]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.slow
def test_a_search_changes_precision_on_demand(recipe: Path):
    words = ["training.micro_batch_size=1"]
    devices = parse_devices("1xA100-40")
    found = LayoutSearch(str(recipe), [*words, "activation_checkpointing=none"], devices, any_precision=True).fastest()
    assert {choice.made.plan.recipe.precision for choice in found.choices} == {"fp32", "bf16"}
    given = LayoutSearch(str(recipe), [*words, "precision=fp32"], devices, any_precision=True, most_plans=1).fastest()
    assert {choice.made.plan.recipe.precision for choice in given.choices} == {"fp32"}


@pytest.mark.slow
def test_the_largest_batch_fits_and_one_row_more_does_not(recipe: Path, capsys: pytest.CaptureFixture[str]):
    given = "training.micro_batch_size=3"
    assert main(["plan", str(recipe), "--gpus", "1x1120MiB", "--largest", "batch", given, "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err == f"note: --largest batch overrides {given}\n"
    found = json.loads(shown.out)
    assert found["fits"]
    rows = int(found["overrides"][1].partition("=")[2])
    assert found["overrides"][0] == f"training.global_batch_size={rows}"
    more = [f"training.global_batch_size={rows + 1}", f"training.micro_batch_size={rows + 1}"]
    assert not answer(capsys, recipe, "--gpus", "1x1120MiB", *more)["fits"]


@pytest.mark.slow
def test_the_longest_texts_of_classes_that_only_the_data_knows(recipe: Path, capsys: pytest.CaptureFixture[str]):
    found = answer(capsys, recipe, "--gpus", "1x80GiB", "--largest", "length")
    assert found["overrides"] == ["data.max_length=64"]  # the positions of the model


@pytest.mark.slow
def test_the_largest_model_has_the_shape_of_the_recipe(recipe: Path, capsys: pytest.CaptureFixture[str]):
    found = answer(capsys, recipe, "--gpus", "1x1120MiB", "--largest", "model")
    assert found["fits"]
    sizes = {word.split(".")[2].split("=")[0]: int(word.partition("=")[2]) for word in found["overrides"]}
    heads = sizes["num_attention_heads"]
    assert heads > 4
    assert sizes == {
        "hidden_size": 16 * heads, "num_attention_heads": heads, "intermediate_size": 64 * heads,
        "num_hidden_layers": round(heads / 2),
    }  # fmt: skip
    larger = [f"model.config.{key}={3 * size // 2}" for key, size in sizes.items() if key != "num_attention_heads"]
    assert not answer(capsys, recipe, "--gpus", "1x1120MiB", "--changes", 0, *larger)["fits"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"name_or_path": "some/bert"}, "set `model.name_or_path` to null"),
        (TINY_TASKS["seq2seq_lm"].model, "of one stack"),
    ],
)
def test_models_without_one_shape_have_no_largest(recipe: Path, model: dict[str, Any], message: str):
    keys = json.loads(recipe.read_text()) | {"model": model, "task": TINY_TASKS["seq2seq_lm"].keys}
    recipe.write_text(json.dumps(keys))
    with pytest.raises(UsageError, match=message):
        searching.LayoutSearch(str(recipe), (), parse_devices("1x80GiB")).largest_model()


@pytest.mark.slow
def test_the_fewest_gpus(recipe: Path, capsys: pytest.CaptureFixture[str]):
    needed = answer(capsys, recipe, "--gpus", "1x80GiB", "activation_checkpointing=full", "training.micro_batch_size=1")
    assert answer(capsys, recipe, "--gpus", "autox80GiB")["ranks"][0]["rank"] == 0
    less = (needed["needed_bytes"] - 2**16) / 2**20
    found = answer(capsys, recipe, "--gpus", f"autox{less:.3f}MiB")
    assert found["layout"] != "one process"
    assert found["fits"]


PIPELINES: dict[str, tuple[int, dict[str, Any], str]] = {
    "4 stages": (4, {"strategy": "ddp", "pipeline": {"stages": 4}}, "fp32"),
    "gpipe x tensor": (4, {"strategy": "ddp", "tensor": 2, "pipeline": {"stages": 2, "schedule": "gpipe"}}, "bf16"),
}


@pytest.mark.parametrize(
    ("world_size", "parallel", "precision"),
    [
        pytest.param(*case, id=name, marks=pytest.mark.slow if name == "4 stages" else pytest.mark.nightly)
        for name, case in PIPELINES.items()
    ],
)
def test_one_microbatch_gives_the_plan_of_all(world_size: int, parallel: dict[str, Any], precision: str):
    config = {**SMALL_BERT, "num_hidden_layers": 6}
    model = {"config": config, "tokenizer": "none", "freeze": ["layer.1.attention", "layer.2.attention"]}
    training = {"max_steps": 4, "global_batch_size": 24, "micro_batch_size": 4}
    recipe = recipe_of({"model": model, "training": training, "parallel": parallel, "precision": precision})
    plan = plan_run(recipe, world_size)
    for short in plan_steps(plan, LENGTH):
        whole = plan_step(plan, short.rank, LENGTH)
        assert short.peak.num_bytes == pytest.approx(whole.peak.num_bytes, rel=0.001)
        assert traffic_by_axis(short) == traffic_by_axis(whole)
        assert short.totals.flops == whole.totals.flops


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.nightly)])
def test_one_microbatch_has_the_loss_of_tokens(schedule: str):
    model = {"config": {**TINY_DECODERS["llama"], "vocab_size": 4099}, "tokenizer": "none"}
    parallel = {"strategy": "ddp", "pipeline": {"stages": 2, "schedule": schedule}}
    recipe = recipe_of(
        {
            "task": TINY_TASKS["causal_lm"].keys,
            "model": model,
            "training": {"max_steps": 4, "global_batch_size": 24, "micro_batch_size": 4},
            "parallel": parallel,
        }
    )
    plan = plan_run(recipe, 2)
    *_, short = plan_steps(plan, LENGTH)
    whole = plan_step(plan, short.rank, LENGTH)
    assert short.peak.num_bytes == pytest.approx(whole.peak.num_bytes, rel=0.001)
    assert short.totals.flops == whole.totals.flops
