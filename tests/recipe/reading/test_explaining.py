from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.recipes import CLASS_METRICS
from trainer.base.errors import RecipeError
from trainer.recipe.reading import suggesting
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.registered import task_sections

Minimal = dict[str, Any]
TASKS = ", ".join(f'"{name}"' for name in task_sections())  # also those of features


@pytest.mark.parametrize(
    ("written", "key", "meant"),
    [
        ("task.metrics=f1", "task.metrics", ["f1"]),
        (
            "task.metrics=[accuracy, f1_macro]",
            "task.metrics",
            ["accuracy", "f1_macro"],
        ),  # a shell has removed the quotes
        ("task.labels=Good, Bad", "task.labels", ["Good", "Bad"]),
        ("optimizer.betas=0.9,0.95", "optimizer.betas", [0.9, 0.95]),
        ('data.map.where=x in ["a", "b"]', "data.map.where", ['x in ["a", "b"]']),
        ("task.type=text-classification", "task.type", "sequence_classification"),
        ("task.type=Sentiment Analysis", "task.type", "sequence_classification"),
    ],
)
def test_values_with_one_meaning_are_taken(
    write: Callable[..., str], minimal: Minimal, written: str, key: str, meant: object
) -> None:
    resolved = load_recipe(write(minimal), [written])
    assert resolved.values[key] == meant
    assert str(resolved.origins[key]) == "command line"


@pytest.mark.parametrize(
    ("data", "source"),
    [({"train": "rows.csv"}, "files"), ({"name": "nyu-mll/glue"}, "hub"), ({"path": "rows"}, "folder")],
)
def test_the_keys_of_the_data_show_its_source(
    write: Callable[..., str], minimal: Minimal, data: dict[str, str], source: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text("sentence,label\na,1\n")
    (tmp_path / "rows").mkdir()
    assert load_recipe(write(minimal | {"data": data})).values["data.source"] == source


@pytest.mark.parametrize("data", [{}, {"train": "rows.csv", "subset": "mrpc"}, {"trian": "rows.csv"}])
def test_data_of_no_one_source_is_refused(
    problems: Callable[..., list[str]], minimal: Minimal, data: dict[str, str]
) -> None:
    assert "`data.source` is missing" in problems(minimal | {"data": data})[0]


def test_a_longer_word_than_a_choice_is_misspelled(problems: Callable[..., list[str]], minimal: Minimal) -> None:
    assert problems(minimal, "task.metrics=f1_macros")[0].endswith("""; write 'task.metrics=["f1_macro"]'""")


def test_files_are_strict_on_lists(problems: Callable[..., list[str]], minimal: Minimal) -> None:
    minimal["task"]["metrics"] = "accuracy, f1"
    assert problems(minimal)[0].endswith('but is "accuracy, f1"; write ["accuracy", "f1"]')


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            'training.epochs="3"',
            '`training.epochs` must be an integer of at least 1, or a number above 0, but is "3"; write 3 without'
            " quotes",
        ),
        (
            "training.global_batch_size=3.0",
            "`training.global_batch_size` must be an integer of at least 1, but is 3.0; write 3",
        ),
        (
            "training.epochs=true",
            "`training.epochs` must be an integer of at least 1, or a number above 0, but is true",
        ),
        (
            "training.global_batch_size=null",
            "`training.global_batch_size` must be an integer of at least 1, but is null",
        ),
        ("data.num_workers=65", "`data.num_workers` must be an integer of at least 0 and at most 64, but is 65"),
        ("training.max_grad_norm=0", "`training.max_grad_norm` must be a number above 0, or null, but is 0"),
        (
            "training.max_grad_norm=None",
            '`training.max_grad_norm` must be a number above 0, or null, but is "None"; write null without quotes',
        ),
        (
            'optimizer.learning_rate="2e-5"',
            '`optimizer.learning_rate` must be a number above 0, but is "2e-5"; write 2e-5 without quotes',
        ),
        (
            "data.group_by_length=True",
            '`data.group_by_length` must be true or false, but is "True"; write true without quotes',
        ),
        (
            'model.adapter={"type": "lora", "rank_pattern": {"query": 0}}',
            "`model.adapter.rank_pattern` must be an object of names, each with an integer of at least 1, but is"
            ' {"query": 0}',
        ),
        (
            "data.validation=0",
            "`data.validation` must be a number above 0 and below 1, or text that is not blank, or null, but is 0",
        ),
        ("cuda_graphs=1", '`cuda_graphs` must be true or false, or "auto", but is 1'),
        ("data.subset=3", '`data.subset` must be text that is not blank, or null, but is 3; write "3"'),
        (
            "evaluation.every=500",
            '`evaluation.every` must be an interval such as "100 steps" or "1 epoch", or null, but is 500;'
            ' write "500 steps"',
        ),
        (
            "logging.every=1",
            '`logging.every` must be an interval such as "100 steps" or "1 epoch", but is 1; write "1 step"',
        ),
        (
            "logging.every=0 steps",
            '`logging.every` must be an interval such as "100 steps" or "1 epoch", but is "0 steps"',
        ),
        (
            "schedule.warmup=1.5",
            "`schedule.warmup` must be an integer of at least 0, or a number of at least 0 and below 1, but is 1.5",
        ),
        (
            "schedule.name=Cosine",
            '`schedule.name` must be one of "linear", "cosine", "constant", "warmup_stable_decay",'
            ' "cosine_with_restarts", "polynomial", "inverse_sqrt", but is "Cosine"; did you mean "cosine"?',
        ),
        (
            "precision=bfloat16",
            '`precision` must be one of "fp32", "bf16", "fp16", but is "bfloat16"; did you mean "bf16"?',
        ),
        ("precision=fp8", '`precision` must be one of "fp32", "bf16", "fp16", but is "fp8"'),
        (
            "task.metrics=[accuracy, Macro F1]",  # a shell has removed the quotes
            f"`task.metrics` must be a list of at least 1 item, each one of {CLASS_METRICS}, but is"
            """ "[accuracy, Macro F1]"; write 'task.metrics=["accuracy", "f1_macro"]'""",
        ),
        (
            'data.map.where=["x in [Good, Bad]"]',
            """`data.map.where[0]` must compare by in with a list in JSON, such as x in ["Good", "Bad"]""",
        ),
        (
            'task.metrics=["acuracy"]',
            '`task.metrics[0]` is "acuracy"; did you mean "accuracy"? Values are accuracy, f1, f1_macro, f1_micro,'
            " f1_weighted, matthews and 25 more",
        ),
        (
            'task.text=["a", "b", "c"]',
            "`task.text` must be text that is not blank, or a list of 1 to 2 items, each text that is not blank, but is"
            ' ["a", "b", "c"]',
        ),
        (
            "task.type=classification",
            f'`task.type` must be one of {TASKS}, but is "classification"; did you mean "sequence_classification"?',
        ),
        ("data=3", "`data` must be an object, but is 3"),
        ("parallel=null", "`parallel` must be an object, but is null"),
        ("data.name=", '`data.name` must be text that is not blank, but is ""'),
        ('task.text=["a", " "]', '`task.text[1]` must be text that is not blank, but is " "'),
        (
            "checkpoint.mirror=",
            "`checkpoint.mirror` must be text that is not blank, without a variable such as ${HOME}, or null, but is"
            ' ""; write null, or set the variable that was empty',
        ),
        (
            "checkpoint.mirror=${SCRATCH}/a",
            "`checkpoint.mirror` must be text that is not blank, without a variable such as ${HOME}, or null,"
            ' but is "${SCRATCH}/a"; write its value, or set the key on the command line, where the shell fills it',
        ),
        (
            "checkpoint.folder=$WORK/runs",
            "`checkpoint.folder` must be text that is not blank, without a variable such as ${HOME}, but is"
            ' "$WORK/runs"; write its value, or set the key on the command line, where the shell fills it',
        ),
        (
            "checkpoint.folder=None/runs",
            "`checkpoint.folder` must be text that is not blank, without a variable such as ${HOME}, but is"
            ' "None/runs"; set the variable that had no value, or write ./None/runs for this very name',
        ),
        *(
            (
                f"{key}={place}",
                f"`{key}` must be text that is not blank, without a variable such as ${{HOME}}{null}, but is"
                f' "{place}"; name a place behind the protocol, or set the variable that had no value',
            )
            for key, null, place in (
                ("checkpoint.mirror", ", or null", "file://"),
                ("checkpoint.mirror", ", or null", "file:///"),
                ("checkpoint.mirror", ", or null", "nowhere://"),
                ("checkpoint.mirror", ", or null", "s3:///run"),
                ("checkpoint.mirror", ", or null", "gs://None/run"),
                ("checkpoint.mirror", ", or null", "simplecache::hf://"),
                ("checkpoint.folder", "", "http://:8080/run"),
                ("data.cache", ", or null", "abfs:///run"),
            )
        ),
        *(
            (
                f"checkpoint.mirror={place}",
                "`checkpoint.mirror` must be text that is not blank, without a variable such as ${HOME}, or null, but"
                f' is "{place}"; write two slashes behind the protocol, as in s3://bucket/run',
            )
            for place in ("s3:/bucket/run", "file:/run")
        ),
        (
            'task.class_weights={"": 2.0, "b": 1.0}',
            "`task.class_weights` must have names that are not blank; write them, or set the variable that was empty",
        ),
        (
            "evaluation.metric=f1",
            "`evaluation.metric` is `task.metrics` here (a list; `evaluation.best` names the one that selects the best"
            " model)",
        ),
        ("data.files=a.csv", '`data.files` is `data.train` here (with data.source "files")'),
        ("data.shuffle=true", "`data.shuffle` has no counterpart here: the rows of each epoch are shuffled"),
        ("trainig.epochs=3", "`trainig` is not a key; did you mean `training`?"),
        ("epochs=3", "`epochs` is not a key; did you mean `training.epochs`?"),
        ("model.name=x", "`model.name` is not a key; did you mean `model.name_or_path`?"),
        ("training.learning_rate=1", "`training.learning_rate` is `optimizer.learning_rate` here"),
        ("data.path=x", '`data.path` is a key of `data.source` "folder", but `data.source` is "hub"'),
        (
            "optimizer.momentum=0.9",
            '`optimizer.momentum` is a key of `optimizer.name` "sgd", but `optimizer.name` is "adamw"',
        ),
        ("model.trust_remote_code=true", "`model.trust_remote_code` has no counterpart here: a recipe never runs code"),
        (
            "schedule.qqq=1",
            "`schedule.qqq` is not a key; valid keys are name, warmup",
        ),
        ('optimizer={"params": {"lr": 1}}', "`optimizer.params.lr` is `optimizer.learning_rate` here"),
    ],
)
def test_messages_have_key_rule_value_and_remedy(
    problems: Callable[..., list[str]], minimal: Minimal, override: str, message: str
) -> None:
    assert problems(minimal, override) == [f"command line: {message}"]


@pytest.mark.parametrize(
    ("section", "content", "message"),
    [
        ("task", None, "`task` must be an object, but is null"),
        (
            "task",
            {},
            f"`task.type` is missing; it must be one of {TASKS}",
        ),
        (
            "data",
            {"source": "folder"},
            "`data.path` is missing; it must be text that is not blank, without a variable such as ${HOME} (the"
            " folder)",
        ),
    ],
)
def test_missing_keys_are_described(
    problems: Callable[..., list[str]], minimal: Minimal, section: str, content: object, message: str
) -> None:
    (problem,) = problems(minimal | {section: content})
    assert problem.partition(": ")[2] == message


def test_a_missing_section_is_described(problems: Callable[..., list[str]], minimal: Minimal) -> None:
    del minimal["data"]
    assert problems(minimal) == [
        'r.json:1:1: `data` is missing; it must be an object with `source` one of "hub", "files", "folder"'
        " (the source of the examples, and their preparation)"
    ]


@pytest.mark.parametrize(
    "place",
    [
        "file:///run",
        "hdfs:///run",
        "s3://bucket",
        "ftp://me@host:21/",
        "abfs://c@account/run",
        "http://[::1]:80/run",
    ],
)
def test_addresses_with_a_place_are_taken(write: Callable[..., str], minimal: Minimal, place: str) -> None:
    load_recipe(write(minimal), [f"checkpoint.mirror={place}"])


def test_a_shipped_recipe_with_the_key_of_a_missing_feature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "sample.json"
    file.write_text('{"extends": "bert_sample", "task": {"elsewhere": {"tokens": 8}}}')
    with pytest.raises(RecipeError, match=r"`task.elsewhere` is not a key; valid keys are"):
        load_recipe(str(file))
    monkeypatch.setattr(suggesting, "is_shipped", lambda path: path == str(file))
    with pytest.raises(RecipeError, match=r"`task.elsewhere` is a key of a feature that is not installed; restore its"):
        load_recipe(str(file))
    with pytest.raises(RecipeError, match=r"command line: `task.txt` is not a key; did you mean"):
        load_recipe(str(file), ["task.txt=a"])
