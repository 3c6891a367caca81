"""`trainer mine` against `mine_hard_negatives` of sentence-transformers on the exported folder."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import mine_hard_negatives
from torch.nn import functional as F

from tests.helpers.tiny_run import WORDS, write_tiny_run
from tests.helpers.training import TINY_BERT
from trainer.base.errors import ExitCode, UsageError
from trainer.base.owned_lock import OwnedLock
from trainer.cli import main
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.reading.loading import load_recipe
from trainer.training import mining, prediction_files
from trainer.training.mining import Limits, mine, zip_rows
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
def test_negatives_are_those_of_sentence_transformers(trained, tmp_path, options, keys):
    found, expected = mined(trained, tmp_path / "out.jsonl", *options), theirs(trained, **keys)
    assert expected
    assert sorted_rows(found) == sorted_rows(expected)


def test_what_a_killed_command_left_is_removed(trained, tmp_path):
    left = tmp_path / ".saving-out.jsonl"
    left.mkdir()
    (left / "queries").write_bytes(bytes(999))
    assert mined(trained, tmp_path / "out.jsonl", "--number", "2")
    assert list(tmp_path.iterdir()) == [tmp_path / "out.jsonl"]


@pytest.mark.parametrize(("verb", "folder"), [("mine", ".saving-out.jsonl"), ("predict", "out.jsonl.parts")])
def test_two_commands_do_not_write_one_output(trained, tmp_path, capsys, monkeypatch, verb, folder):
    monkeypatch.setattr(prediction_files, "_LOCK_SECONDS", 0.0)
    script = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX);"
        " print(flush=True); time.sleep(60)"
    )
    left = tmp_path / folder
    left.mkdir()
    with subprocess.Popen([sys.executable, "-c", script, str(left / "lock")], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        try:
            command = [verb, str(trained / "run"), "--input", str(trained / "train.jsonl")]
            assert main([*command, "--output", str(tmp_path / "out.jsonl")]) == ExitCode.USER
        finally:
            other.kill()
    assert "another command is writing" in capsys.readouterr().err


def test_a_command_that_waits_for_one_that_ends_does_not_write_over_its_output(tmp_path, monkeypatch):
    folder = tmp_path / "out.parts"

    def removed(lock: OwnedLock) -> bool:
        shutil.rmtree(folder, ignore_errors=True)
        return lock_free(lock)

    lock_free = OwnedLock._try_take
    monkeypatch.setattr(OwnedLock, "_try_take", removed)
    with pytest.raises(UsageError, match=r"another command is writing out\.jsonl"):
        prediction_files.hold(folder, Path("out.jsonl"))


@pytest.mark.slow
def test_two_ranks_find_the_same(trained, tmp_path):
    one = mined(trained, tmp_path / "one.jsonl", "--number", "2")
    two = mined(trained, tmp_path / "two.jsonl", "--number", "2", "--format", "list", "--processes", "2")
    assert two == [
        {"a": row["a"], "documents": [row["b"], row["negative_1"], row["negative_2"]], "label": [1, 0, 0]}
        for row in one
    ]


class Stored:
    def __init__(self, rows: torch.Tensor) -> None:
        self.rows, self.number = rows, len(rows)

    def __call__(self, start: int, stop: int) -> torch.Tensor:
        return self.rows[start:stop]


def test_blocks_and_ranks_change_nothing(monkeypatch):
    draws = torch.Generator().manual_seed(0)
    queries, documents = (F.normalize(torch.randn(n, 5, generator=draws), dim=-1) for n in (13, 40))
    documents[20:] = documents[:20]  # equal ones stand in their order
    pairs = torch.stack([torch.arange(26) % 13, torch.randint(40, (26,), generator=draws)], dim=1)
    limits = Limits(number=4, margin=0.0)
    stored = Stored(queries), Stored(documents)
    whole = dict(zip_rows([mine(*stored, pairs, limits)]))
    monkeypatch.setattr(mining, "_QUERIES_AT_ONCE", 2)
    monkeypatch.setattr(mining, "_DOCUMENTS_AT_ONCE", 7)
    assert dict(zip_rows([mine(*stored, pairs, limits, rank, 3) for rank in range(3)])) == whole
    similar = queries.double() @ documents.double().T
    for query, found in whole.items():
        right = pairs[pairs[:, 0] == query, 1]
        scores = similar[query].round(decimals=6)
        allowed = set((scores <= similar[query, right].min()).nonzero().flatten().tolist()) - set(right.tolist())
        order = sorted(allowed, key=lambda document, scores=scores: (-scores[document], document))
        assert found == order[:4]


@pytest.mark.parametrize(
    ("options", "row", "problem"),
    [
        (["--range-max", "2"], None, "`--range-max` must be at least 3"),
        (["--margin", "nan"], None, "`--margin` must be a finite number"),
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
