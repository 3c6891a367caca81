from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.helpers.processes import finish, start
from trainer.base import extensions
from trainer.base.extensions import Registration
from trainer.features.distillation.section import Distillation
from trainer.recipe.paths import dotted
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.reading.rules import contradictions
from trainer.recipe.schema import FileData, Model, Parallel, TextKeys, Traits
from trainer.recipe.schema.section import clash

Minimal = dict[str, Any]
CONFIG = 'model.config={"model_type": "bert"}'
RANDOM = ("model.name_or_path=null", CONFIG, "model.tokenizer=google-bert/bert-base-uncased")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model.name_or_path=null"],
            "`model.name_or_path` is missing; set it, or `model.config` for random weights",
        ),
        (
            [CONFIG, "model.tokenizer=x/y"],
            "`model.config` with a `model_type` and `model.name_or_path` exclude each other: random or"
            " pretrained weights; set one of them to null",
        ),
        (
            ["model.name_or_path=null", CONFIG],
            "`model.tokenizer` is missing, and random weights (`model.config`) have no tokenizer; set it",
        ),
        (
            ["model.name_or_path=null", "model.config.hidden_size=8", "model.tokenizer=x/y"],
            '`model.config` must hold a "model_type", such as "bert"',
        ),
        (
            [*RANDOM, "model.revision=main"],
            "`model.revision` applies to a hub repository, but the weights are random (`model.config`); remove it",
        ),
        (["model.name_or_path=./no"], "`model.name_or_path` is a folder that does not exist: {here}/no"),
        (["model.tokenizer=../no"], "`model.tokenizer` is a folder that does not exist: {above}/no"),
        (
            ["model.name_or_path=.", "model.revision=main"],
            "`model.revision` applies to a hub repository, but `model.name_or_path` is a folder; remove it",
        ),
        (["data.name=/no"], "`data.name` is a folder that does not exist: /no"),
        (
            ["data.name=.", "data.revision=main"],
            "`data.revision` applies to a hub repository, but `data.name` is a folder; remove it",
        ),
        (["data.source=files", "data.train=no.csv"], "`data.train` is a file that does not exist: {here}/no.csv"),
        (
            ["data.source=files", 'data.train=["r.json", "no.csv"]'],
            "`data.train[1]` is a file that does not exist: {here}/no.csv",
        ),
        (["data.source=folder", "data.path=no"], "`data.path` is a folder that does not exist: {here}/no"),
        (
            ["task.type=seq2seq_lm", "task.target=source"],
            '`task.target` is "source", which is also `task.source`; name another column',
        ),
        (
            ["task.type=seq2seq_lm", "task.generation.early_stopping=true"],
            "`task.generation.early_stopping` applies to a beam search, but `task.generation.num_beams` is 1; remove"
            " it, or use 2 or more",
        ),
        (
            ["task.type=seq2seq_lm", "task.generation.min_new_tokens=64"],
            "`task.generation.min_new_tokens` must be below `task.generation.max_new_tokens` (64), but is 64",
        ),
        (
            ["task.type=seq2seq_lm", "task.generation.do_sample=true", "task.generation.num_beams=2"],
            "`task.generation.do_sample` draws tokens, but `task.generation.num_beams` is 2; set one of them only",
        ),
        (
            ["task.type=causal_lm", "task.text=text", "task.generation.top_k=4"],
            "`task.generation.top_k` applies to drawn tokens, but `task.generation.do_sample` is false; remove it, or"
            " set that to true",
        ),
        (
            ["task.type=causal_lm", "task.text=text", "task.train_on=last"],
            "`task.train_on` applies to `task.messages`, but the examples are `task.text`; remove it",
        ),
        (
            ["task.type=seq2seq_lm", 'task.metrics=["accuracy", "bleu"]', "parallel.pipeline.stages=2"],
            '`task.metrics` has "bleu", a metric of generated texts, for which a rank needs the whole model, but'
            " `parallel.pipeline.stages` is 2; use accuracy or perplexity, and evaluate the exported model without"
            " stages",
        ),
        (
            ["task.multi_label=true", 'task.metrics=["f1"]'],
            '`task.metrics` has "f1", which applies to one class for each row, but `task.multi_label` is true; use'
            ' "f1_micro" or "f1_macro"',
        ),
        (
            ["task.multi_label=true", "task.class_weights=balanced"],
            "`task.class_weights` applies to one class for each row, but `task.multi_label` is true; remove it",
        ),
        (
            ["task.threshold=0.4"],
            "`task.threshold` applies to several labels for each row, but `task.multi_label` is false; remove it, or"
            " set that to true",
        ),
        (["task.class_weights.a=0"], '`task.class_weights` has the weight 0.0 for "a"; use a number above 0'),
        (
            ["data.date=2026-01-30"],
            "`data.date` applies to chats, but `task.type` is sequence_classification; remove it",
        ),
        (
            ["task.type=causal_lm", "task.text=text", "data.date=2026-02-30"],
            '`data.date` must be a date such as 2026-01-31, but is "2026-02-30"',
        ),
        (
            ["data.max_length=100", "data.pad_to=64"],
            "`data.pad_to` must divide `data.max_length` 100, so that no row is padded beyond it, but is 64; use 50",
        ),
        (
            ["data.max_length=100", "data.pad_to=2147483647"],
            "`data.pad_to` must divide `data.max_length` 100, so that no row is padded beyond it, but is 2147483647;"
            " use 100",
        ),
        (
            ["data.max_length=2305843009213693951", "data.pad_to=2147483647"],
            "`data.pad_to` must divide `data.max_length` 2305843009213693951, so that no row is padded beyond it, but"
            " is 2147483647; use 1",
        ),
        (
            [*RANDOM, "parallel.load=broadcast"],
            '`parallel.load` is "broadcast", which sends weights of files, but the weights are random (`model.config`);'
            " remove it",
        ),
        (
            ["data.source=files", f"data.train={__file__}", "data.validation=null", "data.encoding=ansi"],
            '`data.encoding` must be an encoding of texts that Python has, but is "ansi"; did you mean cp1252?',
        ),
        (
            ["data.source=files", f"data.train={__file__}", "data.validation=null", "data.encoding=utf-9"],
            '`data.encoding` must be an encoding of texts that Python has, but is "utf-9"; did you mean utf-8?',
        ),
        (
            ["data.source=files", f"data.train={__file__}", "data.validation=null", "data.encoding=rot13"],
            '`data.encoding` must be an encoding of texts that Python has, but is "rot13"; examples are utf-8,'
            " utf-16 and cp1252",
        ),
        (
            ["data.source=files", f"data.train={__file__}", "data.validation=null", "data.encoding=unicode_escape"],
            '`data.encoding` must be an encoding of texts that Python has, but is "unicode_escape"; examples are utf-8,'
            " utf-16 and cp1252",
        ),
        (
            ["data.source=files", f"data.train={__file__}", "data.validation=null", "data.mixture=[0.7, 0.3]"],
            "`data.mixture` has the weights [0.7, 0.3], but `data.train` has one entry; list at least two files or"
            " patterns there",
        ),
        (
            [
                *("data.source=files", f'data.train=["{__file__}", "{__file__}"]', "data.validation=null"),
                *("data.mixture=[0.7, 0.3]", "task.class_weights=balanced"),
            ],
            '`task.class_weights` is "balanced", which counts every row once, but `data.mixture` changes how often each'
            " is read; write the weights",
        ),
        (
            ["compile=true", "data.padding_free=true", "parallel.tensor=2", "parallel.sequence=true"],
            "`parallel.sequence` is true, but with `data.padding_free` and `compile`, each microbatch would need a"
            " compilation for the positions of a rank; set one of them to false",
        ),
        (['task.text=["a", "a"]'], '`task.text` has the column "a" twice; a pair needs two columns'),
        (
            ["task.label=sentence"],
            '`task.label` is "sentence", which is also `task.text`; name another column',
        ),
        (['task.metrics=["f1", "f1"]'], '`task.metrics` has "f1" more than once; remove one'),
        (['task.labels=["a", "b", "a"]'], '`task.labels` has "a" more than once; remove one'),
        (
            ['task.metrics=["f1"]', 'task.labels=["a", "b", "c"]'],
            '`task.metrics` has "f1", which needs two classes, but `task.labels` has 3; use "f1_macro"',
        ),
        (
            ["task.type=token_classification", "task.words=w", "task.text=t", "task.spans=s"],
            "`task.words` must be set with `task.tags`, or `task.text` with `task.spans`,"
            " but set is `task.words`, `task.text`, `task.spans`",
        ),
        (
            ["task.type=token_classification", "task.words=w", "task.tags=w"],
            '`task.tags` is "w", which is also `task.words`; name another column',
        ),
        (
            ["training.max_steps=5", "training.stop_at_step=6"],
            "`training.stop_at_step` must be at most `training.max_steps` 5, but is 6",
        ),
        (
            ["schedule.name=warmup_stable_decay", "schedule.warmup=0.3", "schedule.decay=0.8"],
            "`schedule.decay` is 0.8, with `schedule.warmup` 0.3 more than all steps; shorten one of them",
        ),
        (
            ["schedule.name=warmup_stable_decay", "training.max_steps=9", "schedule.warmup=4", "schedule.decay=6"],
            "`schedule.decay` is 6, with `schedule.warmup` 4 more than `training.max_steps` 9; shorten one of them",
        ),
        (
            ["training.max_steps=5", "schedule.warmup=5"],
            "`schedule.warmup` must be below `training.max_steps` 5, but is 5;"
            " a number below 1 is a fraction of the steps",
        ),
        (
            ["evaluation.best=f1"],
            '`evaluation.best` must be one of `task.metrics` or loss (accuracy, loss), but is "f1"',
        ),
        (
            ["data.validation=null", "evaluation.every=5 steps"],
            '`evaluation.every` is "5 steps", but `data.validation` is null;'
            " set a validation split, or set this key to null",
        ),
        (
            ["logging.project=reviews"],
            '`logging.project` applies only to "wandb", "mlflow", "trackio", but `logging.to` has none of them;'
            " add one, or set this key to null",
        ),
        (
            ["data.validation=null", "evaluation.best=loss"],
            "`evaluation.best` requires evaluations, but `data.validation` is null; set that, or remove this key",
        ),
        (
            ["evaluation.every=null", "evaluation.patience=2"],
            "`evaluation.patience` requires evaluations, but `evaluation.every` is null; set that, or remove this key",
        ),
        (["checkpoint.folder=runs/{nmae}"], '`checkpoint.folder` has "{nmae}"; the only placeholder is {name}'),
        *(
            (
                [f"checkpoint.folder={folder}"],
                f'`checkpoint.folder` must be below the current folder, but is "{folder}"; write it as an absolute'
                " path",
            )
            for folder in ("../../{name}", "runs/../../{name}", "..")
        ),
    ],
)
def test_keys_that_do_not_go_together(
    problems: Callable[..., list[str]], minimal: Minimal, tmp_path: Path, overrides: list[str], message: str
) -> None:
    expected = message.replace("{here}", str(tmp_path)).replace("{above}", str(tmp_path.parent))
    assert [problem.partition(": ")[2] for problem in problems(minimal, *overrides)] == [expected]


@pytest.mark.parametrize(
    "overrides",
    [
        RANDOM,
        ["evaluation.best=loss"],
        ['logging.to=["wandb"]', "logging.project=my reviews"],
        ["evaluation.every=null", "evaluation.best=null", "evaluation.patience=null"],
        ["training.max_steps=5", "training.stop_at_step=5", "schedule.warmup=4"],
        ["training.max_steps=1", "schedule.warmup=0.5"],
        ["data.validation=null", "evaluation.every=null"],
        ['task.metrics=["f1"]', 'task.labels=["a", "b"]'],
        ["data.source=files", 'data.train=["r.json"]'],
        ["model.name_or_path=.", "data.name=."],
    ],
)
def test_keys_that_do(write: Callable[..., str], minimal: Minimal, overrides: list[str]) -> None:
    load_recipe(write(minimal), overrides)


def test_a_contradiction_is_reported_where_its_first_key_stands(
    problems: Callable[..., list[str]], minimal: Minimal
) -> None:
    minimal["training"] = {"max_steps": 5, "stop_at_step": 6}
    (problem,) = problems(minimal)
    assert problem.startswith("r.json:1:260: `training.stop_at_step` must be at most")


@pytest.mark.parametrize(
    ("task", "overrides", "messages"),
    [
        ({"texts": ["a", "b", "a"]}, [], ['`task.texts` has "a" more than once; remove one']),
        (
            {"texts": ["a", "b"], "score": "s"},
            [],
            ['`task.score` is "s", but `task.loss` multiple_negatives reads no score'],
        ),
        ({"texts": ["a", "b"], "metrics": ["spearman"]}, [], ['`task.metrics` has "spearman", which needs scores']),
        (
            {"texts": ["a", "b", "c"], "loss": "cosine", "metrics": ["mrr"], "temperature": 0.1},
            [],
            [
                '`task.metrics` has "mrr", which needs positives, but `task.loss` is cosine',
                "`task.score` is missing, but `task.loss` cosine needs it",
                "`task.temperature` does not apply to `task.loss` cosine",
                "`task.texts` must name two columns for `task.loss` cosine, but names 3",
            ],
        ),
        (
            {"texts": ["a", "b"]},
            ["training.global_batch_size=1", "training.micro_batch_size=1"],
            ["`training.global_batch_size` must be at least 2 for `task.loss` multiple_negatives"],
        ),
        (
            {"texts": ["a", "b"]},
            ["parallel.strategy=dp"],
            ["`parallel.strategy` is dp, in which each copy of the model computes the loss of its own rows"],
        ),
        ({"texts": ["a", "b"], "score": "s", "loss": "cosent", "metrics": ["spearman"]}, [], []),
        ({"texts": ["a", "b", "c"]}, ["training.global_batch_size=1", "training.micro_batch_size=1"], []),
    ],
)
def test_embeddings_need_rows_to_compare(
    write: Callable[..., str],
    problems: Callable[..., list[str]],
    minimal: Minimal,
    task: dict[str, Any],
    overrides: list[str],
    messages: list[str],
) -> None:
    minimal["task"] = {"type": "embedding", **task}
    if not messages:
        load_recipe(write(minimal), overrides)
        return
    found = sorted(problem.partition(": ")[2] for problem in problems(minimal, *overrides))
    assert len(found) == len(messages)
    assert all(problem.startswith(message) for problem, message in zip(found, messages, strict=True)), found


@pytest.mark.parametrize("traits", [Traits(), Traits(streams=True, teacher=True, chats=True, noise=True)])
def test_a_task_uses_the_parts_of_a_recipe_that_it_states(traits: Traits):
    class Keys(TextKeys):
        type: Literal["free"]

    Keys.traits = traits
    sections = {
        "task": Keys(type="free", text="text"),
        "model": Model.model_validate({"name_or_path": "a/b", "neftune_alpha": 5.0}),
        "data": FileData(source="files", train="https://a/b.jsonl", streaming=True, date="2026-01-31"),
        "distillation": Distillation(teacher="a/b"),
        "parallel": Parallel(),
    }
    refused = {key for one in contradictions(sections) for key in map(dotted, one.keys)} - {"task.type"}
    assert refused == (
        set() if traits.streams else {"model.neftune_alpha", "data.streaming", "data.date", "distillation"}
    )


def test_the_rules_may_be_imported_first():
    """A feature that imports them while they import the features would make a circle."""
    ended = finish(start([sys.executable, "-c", "import trainer.recipe.reading.rules"]), 120)
    assert ended.returncode == 0, ended.stderr


def test_features_may_have_rules_over_the_same_sections(monkeypatch: pytest.MonkeyPatch):
    recipe = load_recipe("bert_sample").recipe
    for key in ("first", "second"):
        name, rule = f"training.{key} model", lambda training, model, key=key: [clash(f"is {key}", "training.seed")]
        monkeypatch.setitem(extensions._registered, ("rule", name), Registration("rule", name, rule, None))
    found = contradictions({"training": recipe.training, "model": recipe.model})
    assert {row.text for row in found} == {"is first", "is second"}
