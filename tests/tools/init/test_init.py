"""`trainer init` as a user types it: from a file to a run, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer.base.errors import ExitCode
from trainer.cli import init as verb
from trainer.cli import main
from trainer.recipe.reading.loading import load_recipe
from trainer.tools.init import proposal


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _plans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a plan, which takes seconds, in the tests that need one only."""
    if request.function not in (
        test_a_csv_becomes_a_recipe_that_trains,
        test_keys_and_options_of_the_user_are_taken,
        test_a_file_without_names_and_rows_longer_than_the_model_are_noted,
    ):
        monkeypatch.setattr(
            proposal, "plan_recipe", lambda _, devices: SimpleNamespace(needed=2**30, devices=devices, fits=True)
        )


def write_csv(name: str = "my.csv", number: int = 200, delimiter: str = ",", head: str = "") -> str:
    lines = [f"a {('good', 'bad')[row % 2]} thing {row}{delimiter}{('good', 'no')[row % 2]}" for row in range(number)]
    Path(name).write_text("\n".join([f"{head}text{delimiter}label", *lines, ""]), encoding="utf-8")
    return name


def test_a_csv_becomes_a_recipe_that_trains(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", write_csv(), "--yes"]) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert "data      200 rows of text (text, 200 distinct), label (text, 2 distinct)\n" in shown
    assert shown.endswith("wrote     my.yaml\nnext      trainer run my.yaml\n")
    text = Path("my.yaml").read_text()
    assert "type: sequence_classification  # `label` has 2 classes\n" in text
    recipe = load_recipe("my.yaml").recipe
    assert (recipe.data.max_length, recipe.training.global_batch_size, recipe.training.micro_batch_size) == (16, 16, 16)
    assert main(["run", "my.yaml", "training.epochs=2", "evaluation.verify_export=0"]) == ExitCode.DONE
    assert Path("runs/my/model/config.json").is_file()
    assert json.loads(Path("runs/my/model/config.json").read_text())["label2id"] == {"good": 0, "no": 1}
    assert main(["init", "my.csv", "--yes"]) == ExitCode.USER
    assert "my.yaml exists; add --overwrite" in capsys.readouterr().err
    assert main(["init", "my.csv", "--yes", "--overwrite", "name=another"]) == ExitCode.DONE
    assert load_recipe("my.yaml").recipe.name == "another"


def test_keys_and_options_of_the_user_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "google-bert/bert-base-uncased", "--gpus", "2xH100", "-o", "b.yml", "training.epochs=1"]
    assert main(["init", write_csv(delimiter=";", head="\ufeff"), "--yes", *options]) == ExitCode.DONE
    recipe = load_recipe("b.yml").recipe
    assert recipe.model.name_or_path == "google-bert/bert-base-uncased"
    assert (recipe.precision, recipe.training.epochs, recipe.optimizer.learning_rate) == ("bf16", 1, 2e-5)
    assert recipe.data.max_length == 16  # by bytes, because the tokenizer is on the hub
    shown = capsys.readouterr().out
    assert "batch     rows of a step: 16; at most 16 in a forward pass, planned: " in shown
    assert "is read with semicolons" in shown


def test_a_file_without_names_and_rows_longer_than_the_model_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{'long ' * (300 if row % 2 else 3)}{row},{'ab'[row % 2]}" for row in range(30)]
    Path("my.csv").write_text("\n".join(rows), encoding="utf-8")
    assert main(["init", "my.csv", "--yes"]) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert "note      the first line gives the columns their names, but `a` is also a value there;" in shown
    assert "length    128 tokens: the most of the model; 50% of the rows have as many tokens or more\n" in shown


def test_tools_of_chats_are_left_to_a_pretrained_model(capsys: pytest.CaptureFixture[str]) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    Path("chats.jsonl").write_text(json.dumps({"messages": chat, "tools": "tools"}), encoding="utf-8")
    assert main(["init", "chats.jsonl", "--yes"]) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert "column `tools` is not read" in shown
    assert "the first line" not in shown, "of JSON, which has no line of names"
    comment = "  # the sample writes no tools; with a pretrained model add tools: tools"
    assert f"messages: messages{comment}\n" in Path("chats.yaml").read_text()


def test_at_most_five_questions_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [f"{row},title {row},text {row},{'ab'[row % 2]}" for row in range(40)]
    Path("my.csv").write_text("\n".join(["id,title,body,kind", *rows]), encoding="utf-8")
    asked: list[str] = []

    def prompt(question: str, default: str, **_: bool) -> str:
        asked.append(question)
        return {0: "nonsense", 1: "masked_lm"}.get(len(asked) - 1, default)

    monkeypatch.setattr(verb.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(verb.typer, "prompt", prompt)
    assert main(["init", "my.csv"]) == ExitCode.DONE
    assert [question.split()[0] for question in asked] == ["task", "task", "model", "device,"]
    assert load_recipe("my.yaml").recipe.task.type == "masked_lm"
    asked.clear()
    monkeypatch.setattr(verb.typer, "prompt", lambda question, default, **_: (asked.append(question), default)[1])
    assert main(["init", "my.csv", "-o", "2.yaml"]) == ExitCode.DONE
    assert len(asked) == 5


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", b"caf\x81\x8d,b\n1,2\n", "must hold text in the encoding utf-8"),
        (
            "a.csv",
            b"text,label\n" + b"one,p\ntwo,p\n" * 9,
            '`label` is "p" in all rows; correct it, name',
        ),
        ("a.csv", b"text,label\n" + b"one,\ntwo,\n" * 9, "`label` is empty in all rows"),
        ("a.jsonl", b'{"a": {"text": "b"}, "label": "c"}\n' * 9, "a (object), label (text, 1 distinct)"),
        ("a.csv", b"", "must hold at least one row"),
        ("a.csv", b"text,label\n", "must hold at least one row"),
        ("a.txt", b"x\n", "`a.txt` must end with one of .json"),
        ("a.jsonl", b'{"a": 1}\n{"a": 2}\n', "no task fits the columns of `a.jsonl`: a (integer, 2 distinct)"),
        ("a.json", b'{"data": [{"paragraphs": []}], "version": "1"}', "one object with the rows in it"),
        ("a.jsonl", b'{"text": "a", "label": {"id": 1}}\n' * 9, "`label` holds objects; write one of their values"),
        ("a.xlsx", b"PK\x03\x04text", "must hold Excel files, but `"),
        ("folder/a.md", b"", "`folder` holds no file of a known format"),
        ("other.csv", b"", "`a.csv` is no file and no folder; for a data set of the hub, fetch it first"),
    ],
)
def test_data_without_a_task_is_refused(
    name: str, content: bytes, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("folder").mkdir()
    Path(name).write_bytes(content)
    source = "folder" if "/" in name else "a.csv" if name == "other.csv" else name
    assert main(["init", source, "--yes"]) == ExitCode.USER
    assert words in capsys.readouterr().err
    assert not list(Path().glob("*.yaml"))


def test_columns_of_flags_and_decimal_commas_train(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        f"a {('good', 'bad')[row % 2]} thing {row};{row % 2};{row % 3 // 2};{row / 8}".replace(".", ",")
        for row in range(40)
    ]
    Path("my.csv").write_text("\n".join(["comment;toxic;rude;points", *rows]), encoding="utf-8")
    assert main(["init", "my.csv", "--yes"]) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert "task      sequence_classification: 2 columns of 0 and 1, each is a label of its own\n" in shown
    assert "note      the label may be another column: task.label=" in shown
    assert "task.label=points (number, 40 distinct)" in shown
    assert main(["check", "my.yaml"]) == ExitCode.DONE
    assert main(["init", "my.csv", "--yes", "-o", "2.yaml", "task.label=points"]) == ExitCode.DONE
    assert "type: sequence_regression  # `points` holds numbers\n" in Path("2.yaml").read_text()
    assert main(["check", "2.yaml"]) == ExitCode.DONE


def test_a_given_type_keeps_text_and_label(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"text {row},{row % 4 / 2}" for row in range(40)]
    Path("my.csv").write_text("\n".join(["body,points", *rows]), encoding="utf-8")
    assert main(["init", "my.csv", "--yes", "task.type=sequence_classification", "-o", "x.yaml"]) == ExitCode.USER
    task = load_recipe("x.yaml").recipe.task
    assert (task.text, task.label) == ("body", "points")
    Path("my.csv").write_text("\n".join(["body,label", *(f"text {row},p" for row in range(40))]), encoding="utf-8")
    assert main(["init", "my.csv", "--yes", "task.type=sequence_classification"]) == ExitCode.USER
    assert '`label` is "p" in all rows' in capsys.readouterr().err


def test_problems_of_rows_come_with_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"text {row},{row % 2}" for row in range(30)]
    Path("my_train.csv").write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    Path("my_dev.csv").write_text("\n".join(["text,label", *rows[:3], "text 3,7", *rows[4:]]), encoding="utf-8")
    assert main(["init", "my_train.csv", "--yes", "-o", "my.yaml"]) == ExitCode.USER
    shown = capsys.readouterr()
    assert shown.out.endswith("mended\nnext      trainer check my.yaml\n")
    assert "(line 5) of `" in shown.err
    write_csv()
    assert main(["init", "my.csv", "--yes", "-o", "x.yaml", "data.delimiter=';;'"]) == ExitCode.USER
    assert "`data.delimiter` must be" in capsys.readouterr().err
    assert main(["init", "my.csv", "-o", "x.json", "--yes"]) == ExitCode.USER
    assert "`--output` must end with .yaml or .yml" in capsys.readouterr().err
    assert main(["init", "my.csv"]) == ExitCode.USER
    assert "add --yes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("classes", "words"),
    [(("1e5", "2e5", "1e3"), "3 classes"), (("+1", "1", "-1"), "3 classes"), (("-0", "0", "1"), "3 classes")],
)
def test_classes_that_look_like_numbers_stay_texts(classes, words, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"text {row},{'ab'[row % 2]},{classes[row % 3]},{row % 2}" for row in range(60)]
    Path("my.csv").write_text("\n".join(["text,topic_of_row,label,helpful", *rows]), encoding="utf-8")
    assert main(["init", "my.csv", "--yes"]) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert f"task      sequence_classification: `label` has {words}\n" in shown
    assert f"label (text, {words.replace('classes', 'distinct')})" in shown
    assert "note      the label may be another column: task.label=topic_of_row (text, 2 distinct)" in shown
    assert main(["check", "my.yaml"]) == ExitCode.DONE
