from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.base.errors import ExitCode, RecipeError
from trainer.recipe.reading.loading import MAX_EXTENDS, MAX_PROBLEMS, load_recipe
from trainer.recipe.reading.shipped import shipped_folder
from trainer.recipe.schema import SGD, AdamW, FileData, HubData, Interval, SequenceRegression
from trainer.recipe.strategies import STRATEGIES

Write = Callable[..., str]
Minimal = dict[str, Any]


def test_defaults_fill_omitted_keys(write: Write, minimal: Minimal) -> None:
    resolved = load_recipe(write(minimal))
    assert resolved.recipe.training.epochs == 3
    assert resolved.recipe.optimizer == AdamW()
    assert str(resolved.origins["training.epochs"]) == "default"
    assert str(resolved.origins["task.type"]) == "r.json:1:38"
    assert resolved.values["evaluation.every"] == "1 epoch"
    assert resolved.origins.keys() == resolved.values.keys()


def test_extends_merges_key_by_key_and_the_file_wins(write: Write, minimal: Minimal) -> None:
    write(minimal | {"training": {"epochs": 7, "seed": 1}, "logging": {"to": ["console", "jsonl"]}}, "base.json")
    write({"extends": "base.json", "training": {"epochs": 8}, "logging": {"to": ["jsonl"]}}, "middle.json")
    resolved = load_recipe(write({"extends": "middle.json", "name": "leaf", "evaluation": {"every": None}}))
    recipe = resolved.recipe
    assert (recipe.name, recipe.training.epochs, recipe.training.seed) == ("leaf", 8, 1)
    assert recipe.logging.to == ["jsonl"]
    assert recipe.evaluation.every is None
    sources = [
        resolved.origins[key].source for key in ("name", "training.epochs", "training.seed", "training.max_steps")
    ]
    assert sources == ["r.json", "middle.json", "base.json", "default"]


def test_extends_finds_shipped_recipes_and_files_in_other_folders(write: Write, minimal: Minimal) -> None:
    write({"extends": "bert_base", "training": {"seed": 9}}, "one/base.json")
    resolved = load_recipe(write(minimal | {"extends": "../one/base.json"}, "two/r.json"))
    assert resolved.recipe.training.seed == 9
    assert resolved.recipe.schedule.warmup == 0.1
    assert resolved.origins["schedule.warmup"].source == str(shipped_folder() / "bert_base.json")


def test_a_file_wins_over_a_shipped_recipe_of_the_same_name(write: Write, minimal: Minimal) -> None:
    write(minimal, "bert_base_mrpc")
    assert load_recipe("bert_base_mrpc").recipe.name == "minimal"
    os.remove("bert_base_mrpc")
    os.mkdir("bert_base_mrpc")
    assert (
        load_recipe("bert_base_mrpc").recipe.name == load_recipe("bert_base_mrpc.json").recipe.name == "bert_base_mrpc"
    )


@pytest.mark.parametrize("text", ["hunter2:x:0", '"hunter2"', "['hunter2']", "[hunter2]"])
def test_a_file_of_another_kind_is_not_shown(text: str, problems: Callable[..., list[str]]) -> None:
    Path("secrets").write_text(text)
    (problem,) = problems('{"extends": "./secrets"}')
    assert problem.endswith("secrets: is not a recipe, which is an object {...}; name another file")


def test_circles_of_extends_are_shown(problems: Callable[..., list[str]], write: Write) -> None:
    write({"extends": "r.json"}, "a.json")
    assert problems('{"extends": "a.json"}') == ["a.json:1:13: `extends` is circular: r.json -> a.json -> r.json"]


def test_a_long_chain_of_extends_is_refused(problems: Callable[..., list[str]], write: Write) -> None:
    for number in range(MAX_EXTENDS + 1):
        write({"extends": f"{number + 1}.json"}, f"{number}.json")
    assert problems({"extends": "0.json"}) == [
        f"{MAX_EXTENDS - 2}.json:1:13: `extends` is nested deeper than the limit of {MAX_EXTENDS} recipes"
    ]


@pytest.mark.parametrize(
    ("extends", "message"),
    [
        ('"nope"', '`extends` "nope": nope: no such file, and no shipped recipe has this name; the nearest are '),
        ('"\ue000"', r'`extends` "\ue000": \ue000: no such file'),
        ('"."', '`extends` ".": .: is not a recipe file; `trainer recipes` lists the shipped recipes'),
        ("3", "`extends` must be a path or a shipped name, but is 3"),
        ('["bert_base"]', '`extends` must be a path or a shipped name, but is ["bert_base"]'),
    ],
)
def test_extends_must_lead_somewhere(problems: Callable[..., list[str]], extends: str, message: str) -> None:
    (problem,) = problems(f'{{"extends": {extends}}}')
    assert problem.startswith(f"r.json:1:13: {message}")


def test_missing_recipes_name_the_shipped_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        RecipeError,
        match="nope: no such file, and no shipped recipe has this name; the nearest are lora_sample,",
    ):
        load_recipe("nope")
    with pytest.raises(RecipeError, match=r"the nearest are bert_sample, .*; `trainer recipes` lists all"):
        load_recipe("bert_sampel.json")
    with pytest.raises(RecipeError, match="is not a recipe file"):
        load_recipe(str(tmp_path))
    with pytest.raises(RecipeError, match="no such file"):
        load_recipe("x" * 5000)


def test_a_vanished_current_folder_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(RecipeError, match="the current folder cannot be used"):
        load_recipe("bert_base_mrpc")


@pytest.mark.parametrize("content", ["[]", "3", '"x"', "null"])
def test_a_recipe_is_an_object(problems: Callable[..., list[str]], content: str) -> None:
    (problem,) = problems(content)
    assert problem.startswith("r.json:1:1: a recipe must be an object {...}, but is ")


# Changes of kind


def test_a_change_of_source_keeps_shared_keys(write: Write, minimal: Minimal) -> None:
    minimal["data"] |= {"max_length": 64, "train": "train[:10]"}
    write(minimal, "base.json")
    write("", "x.csv")
    files = load_recipe(write({"extends": "base.json", "data": {"source": "files", "train": "x.csv"}})).recipe.data
    assert isinstance(files, FileData)
    assert (files.max_length, files.train, files.validation) == (64, os.path.abspath("x.csv"), None)
    folder = load_recipe(write({"extends": "base.json", "data": {"source": "folder", "path": "."}})).recipe.data
    assert (folder.max_length, folder.train) == (64, "train[:10]")


def test_a_change_of_kind_does_not_inherit_required_keys(write: Write, minimal: Minimal) -> None:
    write(minimal, "base.json")
    with pytest.raises(RecipeError) as caught:
        load_recipe(write({"extends": "base.json", "data": {"source": "files"}}))
    assert [problem.partition(";")[0] for problem in caught.value.problems] == ["r.json:1:34: `data.train` is missing"]


def test_a_change_of_task_keeps_only_the_texts(write: Write, minimal: Minimal) -> None:
    minimal["task"] |= {"label": "score", "labels": ["a", "b"], "metrics": ["f1"]}
    task = load_recipe(write(minimal), ["task.type=sequence_regression"]).recipe.task
    assert task == SequenceRegression(type="sequence_regression", text="sentence")


def test_a_change_of_optimizer_works_from_the_command_line_in_any_order(write: Write, minimal: Minimal) -> None:
    minimal["optimizer"] = {"betas": [0.8, 0.9], "weight_decay": 0.1}
    recipe = load_recipe(write(minimal), ["optimizer.learning_rate=1", "optimizer.name=sgd"]).recipe
    assert recipe.optimizer == SGD(name="sgd", learning_rate=1.0, weight_decay=0.1)


def test_the_default_kind_need_not_be_named(write: Write, minimal: Minimal) -> None:
    resolved = load_recipe(write(minimal), ["optimizer.learning_rate=1e-4"])
    assert resolved.recipe.optimizer == AdamW(learning_rate=1e-4)
    assert str(resolved.origins["optimizer.name"]) == "default"


def test_model_config_is_merged_until_its_type_changes(write: Write, minimal: Minimal) -> None:
    minimal["model"] = {
        "config": {"model_type": "bert", "hidden_size": 8},
        "tokenizer": "google-bert/bert-base-uncased",
    }
    path = write(minimal)
    resolved = load_recipe(path, ["model.config.hidden_size=16", "model.config.num_labels=3"])
    assert resolved.recipe.model.config == {"model_type": "bert", "hidden_size": 16, "num_labels": 3}
    assert str(resolved.origins["model.config.hidden_size"]) == "command line"
    other = load_recipe(path, ['model.config={"model_type": "gpt2", "n_embd": 8}'])
    assert other.recipe.model.config == {"model_type": "gpt2", "n_embd": 8}


# Paths


def test_paths_are_relative_to_the_file_that_wrote_them(write: Write, minimal: Minimal, tmp_path: Path) -> None:
    for name in ("one/a.csv", "one/v.csv", "two/b.csv", "c.csv"):
        write("", name)
    minimal["data"] = {"source": "files", "train": ["a.csv", "../two/b.csv"], "validation": "v.csv", "cache": "cache"}
    write(minimal, "one/base.json")
    path = write({"extends": "../one/base.json"}, "two/r.json")
    data = load_recipe(path).recipe.data
    assert isinstance(data, FileData)
    assert data.train == [str(tmp_path / "one/a.csv"), str(tmp_path / "two/b.csv")]
    assert (data.validation, data.cache) == (str(tmp_path / "one/v.csv"), str(tmp_path / "one/cache"))
    data = load_recipe(path, ["data.train=c.csv"]).recipe.data
    assert data.train == str(tmp_path / "c.csv")


def test_the_run_lies_in_the_current_folder(write: Write, minimal: Minimal, tmp_path: Path) -> None:
    path = write(minimal, "deep/r.json")
    assert load_recipe(path).recipe.checkpoint.folder == str(tmp_path / "runs/minimal")
    assert load_recipe(path, ["checkpoint.folder=x/{name}/y"]).recipe.checkpoint.folder == str(tmp_path / "x/minimal/y")


def test_a_name_is_a_folder_where_it_looks_like_one_or_is_one(write: Write, minimal: Minimal, tmp_path: Path) -> None:
    (tmp_path / "deep/local/bert").mkdir(parents=True)
    (tmp_path / "glue").mkdir()
    minimal["model"] = {"name_or_path": "local/bert", "tokenizer": "./local/bert"}
    minimal["data"]["name"] = "../glue"
    recipe = load_recipe(write(minimal, "deep/r.json")).recipe
    assert recipe.model.name_or_path == recipe.model.tokenizer == str(tmp_path / "deep/local/bert")
    assert isinstance(recipe.data, HubData)
    assert recipe.data.name == str(tmp_path / "glue")
    recipe = load_recipe("deep/r.json", ["model.name_or_path=local/bert"]).recipe  # no such folder here: a hub name
    assert recipe.model.name_or_path == "local/bert"


def test_home_is_where_the_user_lives(write: Write, minimal: Minimal, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "bert").mkdir()
    assert load_recipe(write(minimal), ["model.name_or_path=~/bert"]).recipe.model.name_or_path == str(
        tmp_path / "bert"
    )


def test_without_a_validation_split_nothing_is_evaluated(write: Write, minimal: Minimal) -> None:
    assert load_recipe(write(minimal), ["data.validation=null"]).recipe.evaluation.every is None
    assert load_recipe(write(minimal)).recipe.evaluation.every == Interval(1, "epochs")


# Everything that is wrong, at once


def test_all_problems_are_reported_at_once_in_the_order_of_the_file(problems: Callable[..., list[str]]) -> None:
    text = """{
  "name": "a b",
  "task": {"type": "sequence_classification", "text": ["a", "a"], "metrics": ["accurcy"]},
  "model": {},
  "data": {"source": "hub", "name": "nyu-mll/glue", "train": null, "subset": "sst2", "subset": "mrpc"},
  "training": {"epochs": "3", "epoch": 3, "max_steps": 10, "stop_at_step": 20, "seed": NaN},
  "gradient_accumulation_steps": 4,
  "zero_optimization": {"stage": 2}
}"""
    assert problems(text, "training.batch=8", "evaluation.best=f2") == [
        'r.json:2:11: `name` must be 1 to 100 letters, digits, `.`, `_` and `-`, a letter or digit first, but is "a b"',
        'r.json:3:55: `task.text` has the column "a" twice; a pair needs two columns',
        'r.json:3:79: `task.metrics[0]` is "accurcy"; did you mean "accuracy"? Values are accuracy, f1, f1_macro,'
        " f1_micro, f1_weighted, matthews and 25 more",
        "r.json:4:12: `model.name_or_path` is missing; set it, or `model.config` for random weights",
        "r.json:5:62: `data.train` must be text that is not blank, but is null",
        "r.json:5:86: `data.subset` is a duplicate key in one object; first at r.json:5:68",
        'r.json:6:26: `training.epochs` must be an integer of at least 1, or a number above 0, but is "3"; write 3'
        " without quotes",
        "r.json:6:31: `training.epoch` is not a key; did you mean `training.epochs`?",
        "r.json:6:76: `training.stop_at_step` must be at most `training.max_steps` 10, but is 20",
        "r.json:6:88: `training.seed` must be a finite number, but is NaN",
        "r.json:7:3: `gradient_accumulation_steps` has no counterpart here: accumulation follows from"
        " `training.global_batch_size`, `training.micro_batch_size` and the number of ranks",
        f"r.json:8:25: `zero_optimization.stage` is `parallel.strategy` here (one of {', '.join(STRATEGIES)})",
        "command line: `training.batch` is not a key; did you mean `training.global_batch_size`?",
    ]


def test_problems_of_all_files_are_reported_with_their_file(problems: Callable[..., list[str]], write: Write) -> None:
    write('{"training": {"epochs": 0}, "precision": "fp32", "precision": "bf16"}', "base.json")
    reported = problems('{"extends": "base.json", "parallel": {"strategy": "dpp"}}', "training.seed=-1")
    assert [problem.partition(";")[0] for problem in reported] == [
        "r.json:1:1: `name` is missing",
        "r.json:1:1: `task` is missing",
        "r.json:1:1: `model` is missing",
        "r.json:1:1: `data` is missing",
        f'r.json:1:51: `parallel.strategy` must be one of {json.dumps(list(STRATEGIES))[1:-1]}, but is "dpp"',
        "base.json:1:25: `training.epochs` must be an integer of at least 1, or a number above 0, but is 0",
        "base.json:1:50: `precision` is a duplicate key in one object",
        "command line: `training.seed` must be an integer of at least 0 and below 9223372036854775808, but is -1",
    ]


def test_a_contradiction_that_only_follows_from_another_problem_is_not_reported(
    problems: Callable[..., list[str]], minimal: Minimal
) -> None:
    minimal["task"]["metrics"] = ["f3"]
    minimal["evaluation"] = {"best": "f3"}
    assert len(problems(minimal)) == 1


def test_a_flood_of_problems_is_cut(problems: Callable[..., list[str]], minimal: Minimal) -> None:
    reported = problems(minimal | {f"key{number}": number for number in range(2_000)})
    assert len(reported) == MAX_PROBLEMS + 1
    assert reported[-1] == f"and {2_000 - MAX_PROBLEMS} more"


def test_recipe_errors_are_the_users() -> None:
    assert RecipeError().exit_code is ExitCode.USER
