"""`trainer evaluate` and `trainer predict` on a tiny trained model, as a user calls them."""

from __future__ import annotations

import csv
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from transformers import pipeline

from tests.helpers import processes, warm
from tests.helpers.tiny_run import write_tiny_run
from tests.helpers.training import tiny_recipe
from trainer.base.errors import ExitCode, UsageError
from trainer.base.owned_lock import OwnedLock
from trainer.cli import main
from trainer.tools.predict import prediction_files
from trainer.tools.predict.prediction_files import spooled


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    assert main(["run", str(write_tiny_run(folder))]) == 0
    (folder / "train.jsonl").unlink()  # the training data may be gone
    rows = [json.loads(line) for line in (folder / "validation.jsonl").read_text().splitlines()]
    lines = [json.dumps({"text": row["text"], "id": number}) for number, row in enumerate(rows)]
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_evaluate_gives_the_numbers_of_the_training(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    last = [line["eval"] for line in read(trained / "run" / "metrics.jsonl") if "eval" in line][-1]
    capfd.readouterr()
    assert main(["evaluate", str(trained / "run" / "model"), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["metrics"] == pytest.approx(last, abs=1e-6)


def test_predictions_equal_a_pipeline(trained: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    arguments = ["predict", str(trained / "run" / "model"), "--input", str(trained / "in.jsonl")]
    assert main([*arguments, "--output", str(output), "--chunk-rows", "5"]) == 0
    rows = read(output)
    assert [row["id"] for row in rows] == list(range(17))
    classify = pipeline("text-classification", str(trained / "run" / "model"), top_k=None)
    for row in rows:
        expected = {found["label"]: found["score"] for found in classify([row["text"]])[0]}
        assert row["probabilities"] == pytest.approx(expected, abs=2e-6)
        assert row["prediction"] == max(expected, key=lambda name: expected[name])
    assert not (tmp_path / "out.jsonl.parts").exists()

    assert main([*arguments, "--output", str(tmp_path / "out.csv"), "--top", "1"]) == 0
    with (tmp_path / "out.csv").open(newline="") as file:
        assert [row["prediction"] for row in csv.DictReader(file)] == [row["prediction"] for row in rows]
    assert (
        main(["predict", arguments[1], "--input", str(tmp_path / "out.csv"), "--output", str(tmp_path / "x.jsonl")])
        == 2
    )
    table = tmp_path / "out.parquet"
    assert main([*arguments, "--output", str(table), "--chunk-rows", "7"]) == 0
    assert pyarrow.parquet.read_table(table).column("prediction").to_pylist() == [row["prediction"] for row in rows]


def test_the_input_is_read_as_the_files_of_the_training(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, keys = tmp_path / "model", {"encoding": "latin-1", "delimiter": "^", "quotes": False}
    shutil.copytree(trained / "run" / "model", model)
    values = json.loads((model / "trainer_recipe.json").read_text())
    values["data"] |= keys
    (model / "trainer_recipe.json").write_text(json.dumps(values))
    rows = [{"id": "1", "text": 'a "caf\xe9'}, {"id": "2", "text": "a, b"}]
    file = tmp_path / "in.csv"
    file.write_text("id^text\n" + "".join(f"{row['id']}^{row['text']}\n" for row in rows), encoding="latin-1")
    command = ["predict", str(model), "--input", str(file), "--output", str(tmp_path / "out.jsonl")]
    assert main(command) == 0
    assert [{"id": row["id"], "text": row["text"]} for row in read(tmp_path / "out.jsonl")] == rows
    note = 'of the training: `data.encoding` "latin-1", `data.delimiter` "^", `data.quotes` false'
    assert note in capfd.readouterr().err
    file.write_text("text\ncaf\xe9\n", encoding="utf-8")
    assert main([*command, "--overwrite"]) == 2
    assert "in the encoding iso8859-1, but" in (error := capfd.readouterr().err)
    assert "is in UTF-8; set `data.encoding` to utf-8" in error
    assert main([*command, "--overwrite", "data.encoding=utf-8"]) == 0
    assert read(tmp_path / "out.jsonl")[0]["text"] == "caf\xe9"


@pytest.mark.slow
def test_two_processes_and_a_kill_give_the_same_rows(trained: Path, tmp_path: Path) -> None:
    """The command is killed after its first part; the same command goes on and writes each row once."""
    command = ["predict", str(trained / "run"), "--input", str(trained / "in.jsonl")]
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert main([*command, "--output", str(whole)]) == 0
    broken = [*command, "--output", str(output), "--chunk-rows", "2"]
    process = warm.start(broken)
    parts = tmp_path / "out.jsonl.parts"
    deadline = time.monotonic() + 480
    while not list(parts.glob("part-*-000000.jsonl")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate(60)
    assert process.returncode == -signal.SIGKILL
    resumed = processes.finish(warm.start([*broken, "--processes", "2"]))
    assert resumed.returncode == 0, resumed.stderr
    assert "resumes after" in resumed.stderr
    for row, expected in zip(read(output), read(whole), strict=True):
        assert (row["id"], row["prediction"]) == (expected["id"], expected["prediction"])
        assert row["probabilities"] == pytest.approx(expected["probabilities"], abs=2e-6)


def test_a_resumed_command_counts_the_bad_rows_of_earlier_parts(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["the old train", None, "a loud bus", 7, "a red tram"]
    lines = [
        json.dumps({"error": "of the input"} | {"text": text} if text == "a loud bus" else {"text": text})
        for text in texts
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    command = ["predict", str(trained / "run"), "--input", str(tmp_path / "in.jsonl"), "--skip-bad-rows"]
    command += ["--output", str(tmp_path / "out.jsonl"), "--chunk-rows", "2"]
    with monkeypatch.context() as patch:
        patch.setattr(prediction_files.Output, "finish", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            main(command)
    capfd.readouterr()
    assert main(command) == 0
    notes = capfd.readouterr().err
    assert "resumes after 5 rows" in notes
    assert "bad: 2 rows of `" in notes


def test_another_input_starts_anew(trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    parts = tmp_path / "out.jsonl.parts"
    parts.mkdir()
    (parts / "part-0123456789abcdef-000000.jsonl").write_text('{"id": "wrong"}\n')
    arguments = ["--input", str(trained / "in.jsonl"), "--output", str(tmp_path / "out.jsonl"), "--keep", "none"]
    assert main(["predict", str(trained / "run"), *arguments]) == 0
    assert "starts from the first row" in capfd.readouterr().err
    assert [set(row) for row in read(tmp_path / "out.jsonl")] == [{"prediction", "probabilities"}] * 17


@pytest.mark.parametrize("change", ["template", "versions"])
def test_another_template_or_library_is_another_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    def facts() -> dict[str, Any]:
        request = prediction_files.Request(tmp_path / "in.jsonl", "in.jsonl", str(tmp_path / "model" / "out.jsonl"), 2)
        recipe = tiny_recipe(model={"name_or_path": str(tmp_path / "model")})
        return prediction_files.Output(request, recipe)._facts()

    nested = tmp_path / "model" / "additional_chat_templates"
    nested.mkdir(parents=True)
    (tmp_path / "in.jsonl").write_text("{}")
    (nested / "tool_use.jinja").write_text("a")
    before = facts()
    (tmp_path / "model" / "out.jsonl.parts").mkdir()
    (tmp_path / "model" / "out.jsonl.parts" / "part-000000.jsonl").write_text("{}")
    assert facts() == before
    if change == "template":
        (nested / "tool_use.jinja").write_text("b")
    else:
        monkeypatch.setattr(prediction_files, "versions", lambda: {"transformers": "0"})
    assert facts() != before


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("", "must hold at least one row"),
        ('{"label": "a"}\n', "the task reads the column `text`"),
        ('{"text": "word1"}\n{"text": "word2"}\n{"text": null}\n{"text": "word1"}\n', "column `text`, row 3 of `"),
        ('{"text": "word1"}\n{"text"\n', "line 2 of `"),
        ('{"text": "word1", "prediction": 1}\n', "column `prediction` of `"),
    ],
)
def test_wrong_rows(trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], rows: str, message: str) -> None:
    (tmp_path / "in.jsonl").write_text(rows)
    arguments = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl"), "--chunk-rows", "2"]
    assert main(["predict", str(trained / "run"), *arguments]) == 2
    assert message in capfd.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_a_folder_is_no_input(tmp_path: Path) -> None:
    fix = "is a folder; for its images, name a CSV file in it with a column of their names"
    with pytest.raises(UsageError, match=fix), spooled(str(tmp_path)):
        pass


def test_a_folder_without_a_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(tmp_path / "none")]) == 2
    assert "does not exist" in capfd.readouterr().err
    assert main(["evaluate", str(tmp_path)]) == 2
    assert "has neither best/ nor model/" in capfd.readouterr().err


def test_two_commands_do_not_write_one_output(trained: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(prediction_files, "_LOCK_SECONDS", 0.0)
    script = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX);"
        " print(flush=True); time.sleep(60)"
    )
    left = tmp_path / "out.jsonl.parts"
    left.mkdir()
    with subprocess.Popen([sys.executable, "-c", script, str(left / "lock")], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        try:
            command = ["predict", str(trained / "run"), "--input", str(trained / "in.jsonl")]
            assert main([*command, "--output", str(tmp_path / "out.jsonl")]) == ExitCode.USER
        finally:
            other.kill()
    assert "another command is writing" in capsys.readouterr().err


def test_a_command_that_waits_for_one_that_ends_does_not_write_over_its_output(tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "out.parts"

    def removed(lock: OwnedLock) -> bool:
        shutil.rmtree(folder, ignore_errors=True)
        return lock_free(lock)

    lock_free = OwnedLock._try_take
    monkeypatch.setattr(OwnedLock, "_try_take", removed)
    with pytest.raises(UsageError, match=r"another command is writing out\.jsonl"):
        prediction_files.hold(folder, Path("out.jsonl"))
