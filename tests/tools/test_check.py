"""`trainer check` reports all problems of data and model at once, by the functions of the run itself."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from transformers import BertConfig, BertForSequenceClassification

from tests.helpers.tiny_run import write_tiny_image_run, write_tiny_run
from tests.helpers.training import TINY_BERT, TINY_DECODERS
from trainer.base.errors import DataError, ExitCode
from trainer.cli import main
from trainer.data import readers
from trainer.recipe.reading.loading import load_recipe
from trainer.tasks.registry import build_task
from trainer.tools import check
from trainer.training.run_data import prepare_data

NER = {"type": "token_classification"}
HUB = {"config": None, "tokenizer": None, "name_or_path": "owner/unknown"}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def errors(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(list(arguments)) == ExitCode.USER
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    return [line.removeprefix("error: ") for line in shown.splitlines()]


def spoil(folder: Path) -> None:
    """Write rows with two null labels, and a validation split with a label that the training split lacks."""
    rows = [{"text": f"word{row}", "label": "ab"[row % 2]} for row in range(20)]
    rows[2]["label"] = rows[6]["label"] = None  # type: ignore[assignment]
    write_rows(folder / "train.jsonl", rows)
    write_rows(folder / "validation.jsonl", [{"text": "word1", "label": "a"}, {"text": "word2", "label": "c"}])


STARTED = 'model.adapter={"type": "lora", "rank": 2, "start": "pissa"}'


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (["training.max_steps=0"], 1),
        (["data.padding_free=true", "data.pad_to=8"], 1),
        (["parallel.tensor=3"], 1),
        (["model.config.num_attention_heads=3"], 1),
        (["data.max_length=4000", 'model.freeze=["nothing"]'], 2),
        ([STARTED, "data.max_length=4000"], 2),
    ],
    ids=["key", "excluded", "layout", "configuration", "length and modules", "package and length"],
)
def test_a_problem_has_one_text_in_all_verbs_that_build_a_model(tmp_path, capsys, monkeypatch, words, number):
    monkeypatch.setattr("trainer.models.adapter_starts.find_spec", lambda _: None)
    recipe = str(write_tiny_run(tmp_path))
    options = {"check": [], "run": ["--processes", "1"], "plan": ["--gpus", "1x80GiB"], "rehearse": ["--ranks", "1"]}
    shown = {verb: errors(capsys, verb, recipe, *words, *more) for verb, more in options.items()}
    assert len(shown["check"]) == number
    assert [verb for verb in options if shown[verb] != shown["check"]] == []


def test_a_plan_needs_neither_data_nor_places_of_checkpoints(tmp_path, capsys):
    recipe = str(write_tiny_run(tmp_path))
    words = ["checkpoint.mirror=memory://copies"]
    assert "`checkpoint.mirror` must be a place that outlives the run" in errors(capsys, "check", recipe, *words)[0]
    (tmp_path / "train.jsonl").unlink()
    assert main(["plan", recipe, "--gpus", "1x80GiB", *words]) == ExitCode.DONE
    assert main(["rehearse", recipe, "--ranks", "1", *words]) == ExitCode.DONE


def test_a_plan_needs_no_weights_of_a_pretrained_model(tmp_path, capsys):
    recipe = str(write_tiny_run(tmp_path))
    config = json.loads(Path(recipe).read_text())["model"]["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["model.config=null", f"model.name_or_path={tmp_path}"]
    assert any("has no weights" in error for error in errors(capsys, "check", recipe, *words))
    assert main(["plan", recipe, "--gpus", "1x80GiB", *words]) == ExitCode.DONE


def test_a_sound_recipe_passes(tmp_path, capsys, monkeypatch):
    assert main(["check", str(write_tiny_run(tmp_path / "text"))]) == ExitCode.DONE
    assert "checked   no problem was found" in capsys.readouterr().out
    assert main(["check", str(write_tiny_image_run(tmp_path / "images")), "--json"]) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out)["problems"] == []
    assert not (tmp_path / "text" / "cache").exists(), "a check writes nothing"
    kept = ("check", str(tmp_path / "text" / "recipe.json"), 'checkpoint.memory={"every": "1 step"}')
    assert main([*kept]) == ExitCode.DONE
    assert "MiB free" not in capsys.readouterr().out
    monkeypatch.setattr("trainer.features.host_memory.feature.room_in", lambda folder: (2**10, "in the folder"))
    assert main([*kept]) == ExitCode.DONE
    assert "with 0.0 MiB free in the folder of this machine, but 2 checkpoints need" in capsys.readouterr().out
    long = ("training.micro_batch_size=null", "training.micro_batch_tokens=3")
    (found,) = errors(capsys, "check", str(tmp_path / "text" / "recipe.json"), *long)
    assert "`training.micro_batch_tokens` must be at least the 14 tokens of the longest training row (" in found


def test_all_problems_of_data_and_model_are_reported_at_once(tmp_path, capsys):
    keys = {"data": {"max_length": 500}, "parallel": {"tensor": 3}}
    recipe = str(write_tiny_run(tmp_path, model={"adapter": {"type": "lora", "targets": ["nope", "no"]}}, **keys))
    spoil(tmp_path)
    found = errors(capsys, "check", recipe, "--processes", "3")
    for words in (
        "`data.max_length` must be at most the",
        "column `label`, row 3 of",
        "every row needs a label (also row 7)",
        "row 2 of `" + str(tmp_path / "validation.jsonl"),
        "must divide the model's 4 attention heads",
        "`model.adapter.targets` must match modules of the model, but 'nope'",
        "`model.adapter.targets` must match modules of the model, but 'no'",
    ):
        assert sum(words in line for line in found) == 1, (words, found)
    assert main(["check", recipe, "--processes", "3", "--quick"]) == ExitCode.DONE


def test_missing_files_and_columns_are_reported_together(tmp_path, capsys):
    recipe = str(write_tiny_run(tmp_path, data={"validation": "other.jsonl"}))
    for name in ("train.jsonl", "other.jsonl"):
        (tmp_path / name).write_text("")
    found = errors(capsys, "check", recipe)
    assert len(found) == 2
    for key, line in zip(("train", "validation"), found, strict=True):
        assert line.startswith(f"`data.{key}` must hold at least one row, but `")
    write_rows(tmp_path / "train.jsonl", [{"a": "b"}])
    write_rows(tmp_path / "other.jsonl", [{"text": "b"}])
    found = errors(capsys, "check", recipe)
    for words in ("column `text`, but", "column `label`, but `" + str(tmp_path / "train.jsonl")):
        assert any(words in line for line in found), (words, found)
    assert any("column `label`, but `" + str(tmp_path / "other.jsonl") in line for line in found)
    write_rows(tmp_path / "train.jsonl", [{"text": "b"}])  # one problem of both splits
    assert sum("column `label`, but" in line for line in errors(capsys, "check", recipe)) == 1


@pytest.mark.parametrize(
    ("task", "good", "bad", "words"),
    [
        (
            {**NER, "words": "w", "tags": "t"},
            {"w": ["word1", "word2"], "t": ["O", "B-x"]},
            {"w": ["word1", "word2"], "t": ["O"]},
            "2 words",
        ),
        (
            {**NER, "text": "x", "spans": "s"},
            {"x": "word1 word2", "s": [{"start": 0, "end": 5, "label": "A"}]},
            {"x": "word1 word2", "s": [{"start": 0, "end": 50, "label": "A"}]},
            "50",
        ),
        (
            {"type": "causal_lm", "messages": "m"},
            {"m": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            {"m": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
            "assistant",
        ),
        (
            {"type": "sequence_regression", "text": "x", "label": "y"},
            {"x": "a", "y": 1.5},
            {"x": "a", "y": None},
            "null",
        ),
        ({"type": "seq2seq_lm", "source": "x", "target": "y"}, {"x": "a", "y": "b"}, {"x": " ", "y": "b"}, "empty"),
    ],
    ids=["tags", "spans", "chats", "numbers", "sources"],
)
def test_rows_of_every_task_are_checked_without_the_hub(tmp_path, capsys, task, good, bad, words):
    recipe = json.loads(write_tiny_run(tmp_path).read_text())
    recipe |= {"task": task, "model": HUB}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    write_rows(tmp_path / "train.jsonl", [good, bad, good, bad])
    write_rows(tmp_path / "validation.jsonl", [good])
    found = errors(capsys, "check", str(tmp_path / "recipe.json"))
    assert len(found) == 1, found
    assert all(part in found[0] for part in ("row 2 of", words, "(also row 4)"))
    write_rows(tmp_path / "train.jsonl", [good, good])
    assert main(["check", str(tmp_path / "recipe.json")]) == ExitCode.DONE
    *_, before, last = capsys.readouterr().out.splitlines()
    assert before == "checked   no problem was found in the other parts"
    assert last == (
        "unchecked `model.name_or_path` (configuration, weights, tokenizer and lengths of rows):"
        " owner/unknown is neither a folder here nor in the hub's cache; `hf download"
        " owner/unknown` fetches it, unless it is misspelt"
    )


@pytest.mark.parametrize(
    ("task", "row", "keeps_rows"),
    [
        ({"type": "sequence_classification", "text": "x"}, {"x": "word1 " * 20}, True),
        ({**NER, "words": "w", "tags": "t"}, {"w": ["word1"] * 20, "t": ["O", "B-x"] * 10}, False),
        ({"type": "causal_lm", "text": "x", "padding_free": True}, {"x": "word1 " * 60}, False),
        ({"type": "causal_lm", "prompt": "x", "completion": "y"}, {"x": "word1 " * 8, "y": "word2"}, True),
        (
            {"type": "question_answering"},
            {"question": "word1 " * 8, "context": "word2 " * 30, "answers": {"text": ["word2"], "answer_start": [0]}},
            False,
        ),
    ],
    ids=["classes", "tags", "packed texts", "answers", "questions"],
)
def test_a_tokenizer_that_stands_in_gives_no_advice(tmp_path, capsys, task, row, keeps_rows):
    recipe = json.loads(write_tiny_run(tmp_path, data={"max_length": 32}).read_text())
    task = dict(task)
    recipe["data"]["padding_free"] = task.pop("padding_free", False)
    (tmp_path / "recipe.json").write_text(json.dumps({**recipe, "task": task, "model": HUB}))
    for name in ("train", "validation"):
        write_rows(tmp_path / f"{name}.jsonl", [{**row, "label": "ab"[number % 2]} for number in range(16)])
    assert main(["check", str(tmp_path / "recipe.json")]) == ExitCode.DONE
    shown = capsys.readouterr().out
    notes = [line for line in shown.splitlines() if line.startswith("note ")]
    assert [note for note in notes if "holds the rows" not in note and "not read: `label`" not in note] == []
    assert ("\nsteps " in shown) == keeps_rows, "windows and packed rows are counted by the tokenizer"


def test_a_model_in_the_cache_of_the_hub_is_checked_without_the_hub(tmp_path, capsys, monkeypatch):
    recipe = write_tiny_run(tmp_path, model={"config": None, "tokenizer": None, "name_or_path": "owner/name"})
    cached = tmp_path / "hub" / "models--owner--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    folder = cached / "snapshots" / ("0" * 40)
    keys = {key: value for key, value in TINY_BERT.items() if key != "model_type"}
    BertForSequenceClassification(BertConfig(**keys, num_labels=3)).save_pretrained(folder)
    shutil.copytree(tmp_path / "tokenizer", folder, dirs_exist_ok=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("the network was used"))
    assert main(["check", str(recipe), "data.max_length=4"]) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert "note      most training rows are truncated: " in shown, "by its own tokenizer"
    assert "checked   no problem was found\n" in shown
    assert not constants.HF_HUB_OFFLINE
    os.remove(folder / "model.safetensors")
    index = {
        "metadata": {},
        "weight_map": {"bert.embeddings.word_embeddings.weight": "model-00001-of-00002.safetensors"},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))  # without the files that it names
    teacher = tmp_path / "hub" / "models--owner--teacher" / "snapshots" / "main"
    teacher.mkdir(parents=True)
    shutil.copy(folder / "config.json", teacher)
    assert main(["check", str(recipe), "--json", "distillation.teacher=owner/teacher"]) == ExitCode.DONE
    unchecked, of_teacher = json.loads(capsys.readouterr().out)["unchecked"]
    assert unchecked.startswith("`model.name_or_path` (weights): owner/name is neither")
    assert of_teacher.startswith("`distillation.teacher` (weights, tokenizer): owner/teacher is neither")


@pytest.mark.parametrize(
    ("template", "note"),
    [
        (
            "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }} {% else %}{% generation %}{{ m.content }}"
            "{% endgeneration %}{{ sep_token }}{% endif %}{% endfor %}",
            "the token '[SEP]' behind an answer is not trained",
        ),
        (
            "{% for m in messages %}{{ m.role }} {{ m.content }}{{ sep_token }}{% endfor %}",
            "has no {% generation %} marks",
        ),
    ],
    ids=["end token", "no marks"],
)
def test_weak_marks_of_a_template_are_noted_by_each_verb(tmp_path, capsys, template, note):
    recipe = json.loads(write_tiny_run(tmp_path, model={"config": TINY_DECODERS["llama"]}).read_text())
    recipe["task"] = {"type": "causal_lm", "messages": "m"}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(template)
    rows = [{"m": [{"role": "user", "content": "word1"}, {"role": "assistant", "content": "word2"}]}] * 8
    for name in ("train", "validation"):
        write_rows(tmp_path / f"{name}.jsonl", rows)
    for verb in ("check", "preview", "run"):
        assert (
            main([verb, str(tmp_path / "recipe.json"), "training.max_steps=1", 'logging.to=["console"]'])
            == ExitCode.DONE
        )
        assert note in " ".join("".join(capsys.readouterr()).split()), verb


def test_a_fault_that_may_pass_is_no_mistake_of_the_recipe(tmp_path, capsys):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        place = f"http://127.0.0.1:{closed.getsockname()[1]}/rows.jsonl"
    stream = ("data.streaming=true", "data.validation=null", "data.group_by_length=false", 'task.labels=["a", "b"]')
    recipe = str(write_tiny_run(tmp_path))
    arguments = ("check", recipe, f"data.train={place}", *stream, "evaluation.every=null", "evaluation.best=null")
    assert main(list(arguments)) == ExitCode.FAILED
    assert f"`data.train` names {place}, which cannot be read" in capsys.readouterr().err


def test_large_files_are_read_in_part(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(readers, "_LARGE_BYTES", 100)
    monkeypatch.setattr(check, "MOST_ROWS", 10)
    recipe = str(write_tiny_run(tmp_path, task={"labels": ["a", "b", "c"]}))
    with (tmp_path / "train.jsonl").open("a") as rows:
        rows.write('{"text": "word1", "label": null}\n')
    assert main(["check", recipe]) == ExitCode.DONE
    assert f"only the first 10 rows of `{tmp_path / 'train.jsonl'}` are checked" in capsys.readouterr().out
    assert main(["check", recipe, "task.labels=null"]) == ExitCode.DONE
    assert "may lack some classes" in capsys.readouterr().out
    assert main(["check", recipe, "task.label=nope"]) == ExitCode.USER


def test_a_note_names_weights_of_a_mixture_that_only_a_run_can_check(tmp_path, capsys, monkeypatch):
    recipe = str(write_tiny_run(tmp_path))
    (tmp_path / "more.jsonl").write_text((tmp_path / "train.jsonl").read_text())
    entries = [str(tmp_path / name) for name in ("train.jsonl", "more.jsonl")]
    keys = (f"data.train={json.dumps(entries)}", "data.mixture=[1, 0.000001]")
    assert "must be at least one row's share of an epoch" in errors(capsys, "check", recipe, *keys)[0]
    monkeypatch.setattr(check, "MOST_ROWS", 10)
    assert main(["check", recipe, *keys]) == ExitCode.DONE
    assert "so the run finds weights that are too small at its start" in capsys.readouterr().out


def test_weights_are_compared_by_their_headers(tmp_path, capsys):
    keys = {key: value for key, value in TINY_BERT.items() if key != "model_type"}
    folder = tmp_path / "model"
    BertForSequenceClassification(BertConfig(**keys, num_labels=5)).save_pretrained(folder)
    model = {"config": None, "name_or_path": "model"}
    recipe = str(write_tiny_run(tmp_path, model=model))
    assert any("have another size than in this task's model" in line for line in errors(capsys, "check", recipe))
    os.remove(folder / "model.safetensors")
    assert any("which has no weights (model.safetensors)" in line for line in errors(capsys, "check", recipe))


def test_a_run_reports_data_and_model_together(tmp_path, capsys):
    recipe = str(write_tiny_run(tmp_path, model={"adapter": {"type": "lora", "targets": ["nope"]}}))
    spoil(tmp_path)
    found = errors(capsys, "run", recipe)
    assert any("'nope'" in line for line in found)
    assert sum("column `label`, row" in line for line in found) == 2
    assert not list((tmp_path / "run").glob("step-*"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([True, False], "class 0 is false, and class 1 is true"),
        ([1.0, 0.0], "which are read as the numbers of classes"),
        ([0.5, 1.0], "holds the number 0.5; to predict numbers, use `task.type` sequence_regression"),
    ],
)
def test_labels_that_are_no_names(tmp_path, capsys, values, words):
    recipe = str(write_tiny_run(tmp_path, task={"metrics": ["f1"]}))
    for name in ("train.jsonl", "validation.jsonl"):
        write_rows(tmp_path / name, [{"text": f"word{row}", "label": values[row % 2]} for row in range(9)])
    code = main(["check", recipe])
    shown = capsys.readouterr()
    assert (code, words in shown.out + shown.err) == (ExitCode.USER if 0.5 in values else ExitCode.DONE, True)


def test_configurations_that_cannot_be_built(tmp_path, capsys):
    config = {**TINY_BERT, "hidden_act": "os.system"}
    found = errors(capsys, "check", str(write_tiny_run(tmp_path, model={"config": config})))
    assert ["`hidden_act` in `model.config` must be an activation" in line for line in found] == [True]
    for key, value in (("num_hidden_layers", -1), ("num_hidden_layers", 0), ("hidden_size", 0), ("vocab_size", -3)):
        config = {**TINY_BERT, key: value}
        found = errors(capsys, "check", str(write_tiny_run(tmp_path, model={"config": config})))
        expected = f"`{key}` in `model.config` must be at least 1, but is {value}; raise it, or leave it out"
        assert [expected in line for line in found] == [True], found
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**TINY_BERT, "num_hidden_layers": -1}))
    recipe = str(write_tiny_run(tmp_path, model={"config": None, "name_or_path": "model"}))
    assert "must be at least 1, but is -1; raise it, or correct its config.json" in errors(capsys, "check", recipe)[0]
    for depth in (100, 100_000):
        nested = '{"a":' * depth + "1" + "}" * depth
        (folder / "config.json").write_text(f'{{"model_type": "bert", "extra": {nested}}}')
        recipe = str(write_tiny_run(tmp_path, model={"config": None, "name_or_path": "model"}))
        assert "model" in errors(capsys, "check", recipe)[0]


@pytest.mark.slow
def test_divergence_is_distinguished_from_bad_rows(tmp_path, capsys):
    found = errors_of_run(capsys, str(write_tiny_run(tmp_path)), "optimizer.learning_rate=1e9", "schedule.warmup=0")
    assert "finite numbers: lower `optimizer.learning_rate`" in found
    assert "(the learning rate is 8.75e+08)" in found, "the second of eight steps"
    assert "the weights have diverged" in found
    assert "among the rows" not in found


def errors_of_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["run", *arguments]) == ExitCode.NON_FINITE
    return capsys.readouterr().err


def prepared(tmp_path: Path, train: list[dict[str, Any]], validation: list[dict[str, Any]], **sections: Any) -> Any:
    recipe = write_tiny_run(tmp_path, **sections)
    write_rows(tmp_path / "train.jsonl", train)
    write_rows(tmp_path / "validation.jsonl", validation)
    return prepare_data(load_recipe(str(recipe)).recipe)


def labelled(number: int, label: Any = None, first: int = 0) -> list[dict[str, Any]]:
    return [
        {"text": f"word{row % 10} word{row // 10}", "label": "ab"[row % 2] if label is None else label}
        for row in range(first, first + number)
    ]


def test_splits_without_any_text(tmp_path):
    with pytest.raises(DataError, match="must hold a text with a token, but has special tokens only"):
        prepared(tmp_path, [{"text": "", "label": "ab"[row % 2]} for row in range(20)], labelled(8))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("label", float("nan"), "column `label`, row 4 of .* is NaN; every row needs a label"),
        ("label", "x", r"column `label`, row 4 of .* is 'x', and 0 before it has another type"),
        ("text", 7, r"column `text`, row 4 of .* is 7, and 'word0 word0' before it has another type"),
    ],
)
def test_values_of_another_type_are_named_by_row(tmp_path, key, value, words):
    rows = [{**row, "label": "ab".index(row["label"])} for row in labelled(10)]
    rows[3][key] = value
    recipe = load_recipe(str(write_tiny_run(tmp_path))).recipe
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_rows(tmp_path / "validation.jsonl", [{"text": "word1", "label": 0}])
    with pytest.raises(DataError, match=words):
        prepare_data(recipe)


def test_numbers_as_labels_of_a_checkpoint_with_names(tmp_path):
    task = build_task(load_recipe(str(write_tiny_run(tmp_path))).recipe.task).with_classes(("0", "1"), False)
    same, notes = task.in_checkpoint_order(("positive", "negative"), chosen=False)
    assert same == task
    assert notes[0].startswith("labels are the numbers of the checkpoint's classes: 0 is 'positive', 1 is 'negative'")
    assert task.in_checkpoint_order(("0", "1"), chosen=False)[1] == []
    named = task.with_classes(("negative", "positive"), False)
    assert "in another order" in named.in_checkpoint_order(("positive", "negative"), chosen=True)[1][0]


def test_packing_beside_packed_documents_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = {"type": "causal_lm", "packing": "documents", "metrics": ["perplexity"]}
    file = write_tiny_run(tmp_path, task=task, data={"padding_free": True})
    assert main(["check", str(file), "--quick"]) == 2
    assert "`data.padding_free` is true, but rows of several documents" in " ".join(capsys.readouterr().err.split())
