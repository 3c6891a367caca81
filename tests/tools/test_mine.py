"""`trainer mine`: options, columns, prompts and files around `mine_hard_negatives` of sentence-transformers."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import mine_hard_negatives

from tests.helpers.tiny_run import WORDS, write_tiny_run
from tests.helpers.training import TINY_BERT
from trainer.base.errors import ExitCode
from trainer.cli import main
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.reading.loading import load_recipe
from trainer.training.run import run


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of an embedding with prompts, and a file of pairs with queries and documents that repeat."""
    folder = tmp_path_factory.mktemp("mining")
    model = {"config": {**TINY_BERT, "initializer_range": 0.3}}
    recipe = write_tiny_run(folder, task=None, model=model)
    described = json.loads(recipe.read_text())
    prompts = {"query_prompt": "word1 ", "document_prompt": "word2 word3 "}
    described["task"] = {"type": "embedding", "texts": ["a", "b"], "metrics": ["mrr"], **prompts}
    described["training"]["max_steps"] = 1
    recipe.write_text(json.dumps(described))
    rows = [{"a": f"{WORDS[row % 17]} word1", "b": f"{WORDS[row]} {WORDS[row * 7 % 100]}"} for row in range(24)]
    rows += [rows[3], {"a": rows[3]["a"], "b": rows[11]["b"]}]
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(load_recipe(str(recipe)), LaunchEnvironment("none")) == ExitCode.DONE
    return folder


def mined(folder: Path, output: Path, *options: str) -> list[dict[str, Any]]:
    command = ["mine", str(folder / "run"), "--input", str(folder / "train.jsonl"), "-o", str(output), *options]
    assert main(command) == ExitCode.DONE
    return [json.loads(line) for line in output.read_text().splitlines()]


def theirs(folder: Path, **options: Any) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    distinct = list({tuple(row.items()): row for row in rows}.values())
    model = SentenceTransformer(str(folder / "run" / "model"), device="cpu")
    found = mine_hard_negatives(
        datasets.Dataset.from_list(distinct), model, "a", "b", output_format="n-tuple", verbose=False, **options
    )
    return list(found)


def sorted_rows(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(json.dumps(row, sort_keys=True) for row in rows)


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        (["--number", "2"], {"num_negatives": 2}),
        (
            ["--number", "2", "--range-min", "2", "--range-max", "15", "--margin", "-0.1"],
            {"num_negatives": 2, "range_min": 2, "range_max": 15, "absolute_margin": -0.1},
        ),
        (["--number", "1", "--relative-margin", "0.01", "--min-score", "0.1", "--max-score", "0.999"],
         {"num_negatives": 1, "relative_margin": 0.01, "min_score": 0.1, "max_score": 0.999}),
    ],
    ids=["top", "range", "share"],
)  # fmt: skip
def test_negatives_equal_sentence_transformers(trained, tmp_path, options, keys):
    found, expected = mined(trained, tmp_path / "out.jsonl", *options), theirs(trained, **keys)
    assert expected
    assert sorted_rows(found) == sorted_rows(expected)


@pytest.mark.slow
def test_two_processes_find_the_same(trained, tmp_path):
    one = mined(trained, tmp_path / "one.jsonl", "--number", "2")
    two = mined(trained, tmp_path / "two.jsonl", "--number", "2", "--format", "list", "--processes", "2")
    assert two == [
        {"a": row["a"], "documents": [row["b"], row["negative_1"], row["negative_2"]], "label": [1, 0, 0]}
        for row in one
    ]


@pytest.mark.parametrize(
    ("options", "row", "problem"),
    [
        (["--range-max", "2"], None, "`--range-max` must be at least 3"),
        (["--margin", "nan"], None, "`--margin` must be a finite number"),
        (["data.max_length=9"], None, "`data.max_length=9` has no effect"),
        ([], {"a": "word1", "b": " "}, "column `b`, row 1 of .* must be a text, but is empty"),
        ([], {"a": "word1"}, "has no column `b`"),
        ([], {"a": "word1", "b": "word2"}, "none of 1 pairs has so many among 1 documents; lower `--number`"),
        (["-o", "{}/no/out.jsonl"], None, "`--output` must lie in a folder that exists"),
        (["-o", "{}/folder.jsonl", "--overwrite"], None, "`--output` must name a file, but .* is a folder"),
        (["-o", "{}/rows.jsonl", "--overwrite"], {"a": "word1", "b": "word2"}, "another file than `--input`"),
    ],
)
def test_errors_name_the_option_or_the_row(trained, tmp_path, capfd, options, row, problem):
    file = trained / "train.jsonl"
    if row is not None:
        file = tmp_path / "rows.jsonl"
        file.write_text(json.dumps(row) + "\n")
    (tmp_path / "folder.jsonl").mkdir()
    options = [option.format(tmp_path) for option in options]
    command = ["mine", str(trained / "run"), "--input", str(file), "-o", str(tmp_path / "out.jsonl"), *options]
    assert main(command) == ExitCode.USER
    assert re.search(problem, " ".join(capfd.readouterr().err.split()))
    assert not (tmp_path / "out.jsonl").exists()


def test_a_folder_without_its_modules_is_refused(trained, tmp_path, capsys):
    folder = shutil.copytree(trained / "run" / "model", tmp_path / "model")
    (folder / "modules.json").unlink()
    command = ["mine", str(folder), "--input", str(trained / "train.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    assert main(command) == ExitCode.USER
    assert "has no modules.json; name a folder" in " ".join(capsys.readouterr().err.split())


def test_without_the_package_the_error_names_the_extra(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    command = ["mine", str(trained / "run"), "--input", str(trained / "train.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    assert main(command) == ExitCode.USER
    assert 'pip install "recipe-trainer[mining]"' in capsys.readouterr().err


def test_a_launcher_is_refused(trained, tmp_path, capsys, monkeypatch):
    numbers = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (numbers | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    command = ["mine", str(trained / "run"), "--input", str(trained / "train.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    assert main(command) == ExitCode.USER
    assert "run it without a launcher" in capsys.readouterr().err
