"""The audit of runs: scores by hand and beside cleanlab, and flipped labels in real trainings."""

from __future__ import annotations

import csv
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainer
from tests.helpers import processes
from tests.helpers.processes import ROOT
from tests.helpers.tiny_run import write_tiny_run
from tests.tools.audit.flips import FILES, flip, flip_entities, read, similar_pairs
from trainer.base.errors import UsageError
from trainer.recipe.reading.loading import load_recipe
from trainer.tools.audit.audit import audit
from trainer.tools.audit.findings import lines, write_page, write_rows
from trainer.tools.audit.row_record import read_record
from trainer.tools.audit.run_audit import recipe_of, row_numbers
from trainer.tools.audit.scores import confident_issues, scores_of
from trainer.training.run_data import prepare_data

LEAST = 0.7


def records(*rows: tuple[int, float, float, int, int]) -> Any:
    kinds = [("step", "<u4"), ("loss", "<f4"), ("margin", "<f4"), ("label", "<i4"), ("believed", "<i4")]
    return np.array(list(rows), kinds)


def test_scores_by_hand():
    seen = records(
        (0, 1, 2, 0, 0), (0, 3, -1, 1, 0), (1, 2, -4, 0, 1), (1, 1, 3, 1, 1), (2, 0, 5, 0, 0), (2, 5, -1, 1, 2)
    )
    scores = scores_of(seen, np.array([0, 1, 0, 1, 0, 1]), 3)
    assert scores.number.tolist() == [3, 3, 0]
    assert scores.loss[:2].tolist() == [1, 3]
    assert scores.margin is not None
    np.testing.assert_allclose(scores.margin[:2], [1, 1 / 3])
    assert scores.forgotten is not None
    assert scores.forgotten.tolist() == [1, 1, 0]
    assert scores.believed is not None
    assert scores.believed.tolist() == [0, 2, -1]
    assert scores.ranked.tolist() == [1, 0]


def drawn() -> tuple[Any, Any]:
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 4, 500)
    logits = draw.normal(size=(500, 4)) + 3 * np.eye(4)[labels]
    flipped = draw.permutation(500)[:40]
    labels[flipped] = (labels[flipped] + 1) % 4
    odds = np.exp(logits)
    return odds / odds.sum(1, keepdims=True), labels


def test_confident_learning_has_the_formula_of_the_paper():
    probabilities, labels = drawn()
    # Northcutt et al. 2021, equations 1 and 2.
    thresholds = [probabilities[labels == one, one].mean() for one in range(4)]
    expected = []
    for row, label in zip(probabilities, labels, strict=True):
        able = [one for one in range(4) if row[one] >= thresholds[one]]
        expected.append(bool(able) and max(able, key=lambda one: row[one]) != label)
    found = confident_issues(probabilities, labels)
    assert found.tolist() == expected
    assert 20 < found.sum() < 60


def test_confident_learning_is_that_of_cleanlab():
    package = pytest.importorskip("cleanlab.filter")
    probabilities, labels = drawn()
    expected = package.find_label_issues(labels, probabilities, filter_by="confident_learning")
    np.testing.assert_array_equal(confident_issues(probabilities, labels), expected)


def write(folder: Path, rows: list[dict[str, Any]]) -> str:
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data.train={folder / 'train.jsonl'}"


def found_share(run: Path, flipped: set[int]) -> float:
    """Return the share of flipped rows among the first ones that the audit lists, at most as many as were flipped."""
    found = next(one for one in audit(str(run)).findings if one.name == "probably mislabelled")
    first = {row.row for row in found.rows[: len(flipped)]}
    assert len(first) > 0.6 * len(flipped)
    return len(flipped & first) / len(first)


def share_by_run(run: Path, flipped: set[int]) -> float:
    """Return the share by the area under the margin alone."""
    record, recipe = read_record(run), recipe_of(run, ())
    data = prepare_data(recipe)
    scores = scores_of(record.records, row_numbers(record, data, recipe)[0], len(data.train))
    source = data.task.preview.source_rows(data.train)
    rows = scores.ranked if source is None else np.asarray(source)[scores.ranked]
    worst = list(dict.fromkeys(rows.tolist()))[: len(flipped)]
    return len(flipped & {*worst}) / len(flipped)


def trained(folder: Path, recipe: str, rows: list[dict[str, Any]], *keys: str) -> Path:
    always = ["data.validation=null", "evaluation.every=null", "logging.rows=true"]
    where = f"checkpoint.folder={folder / 'run'}"
    trainer.run(load_recipe(recipe, [write(folder, rows), *always, *keys, where]))
    return folder / "run"


def real(name: str) -> list[dict[str, Any]]:
    """Return the training rows of a real data set, or skip the test."""
    if not FILES[name][0].is_file():
        pytest.skip(f"{FILES[name][0]} is not on this machine")
    return read(name)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "least"), [("trec", LEAST), ("sst2", 0.38)])
def test_flipped_labels_of_real_sentences(tmp_path: Path, name: str, least: float):
    """Few flips of SST-2 are found without a pretrained model: its n-grams decide 79 % of the rows."""
    rows = real(name)
    flipped = flip(rows)
    assert found_share(trained(tmp_path, "bert_sample", rows, "training.epochs=1"), flipped) >= least


@pytest.mark.slow
def test_flipped_labels_of_the_sample(tmp_path: Path):
    """The labels are topics that a sentence does not always show: a judge of the right labels finds 67 to 69 %."""
    rows = read("sample")
    flipped = flip(rows)
    assert found_share(trained(tmp_path, "bert_sample", rows, "training.epochs=1"), flipped) >= 0.58


@pytest.mark.nightly
def test_flipped_labels_of_similar_sentences(tmp_path: Path):
    rows = similar_pairs(random.Random(11))
    flipped = flip(rows)
    run = trained(tmp_path, "bert_sample", rows, 'task.text=["first","second"]', "training.epochs=1")
    assert found_share(run, flipped) >= LEAST


@pytest.mark.slow
def test_flipped_entities_of_the_sample(tmp_path: Path):
    """The type of an entity is another one in 5 % of the sentences."""
    rows = read("entities")
    flipped = flip_entities(rows)
    assert found_share(trained(tmp_path, "ner_sample", rows, "training.epochs=1"), flipped) >= LEAST


@pytest.mark.nightly
def test_flipped_labels_of_pairs_are_the_most_suspicious(tmp_path: Path):
    """Pairs of sentences on one of three topics, with 5 % of the labels flipped."""
    draw = random.Random(7)
    texts: dict[str, list[str]] = {}
    for line in (ROOT / "recipes" / "sample" / "train.jsonl").read_text().splitlines():
        texts.setdefault(json.loads(line)["label"], []).append(json.loads(line)["text"])
    topics = sorted(texts)[:3]
    rows = [{"first": one, "second": draw.choice(texts[name]), "label": name} for name in topics for one in texts[name]]
    draw.shuffle(rows)
    rows = rows[:1100]
    flipped = flip(rows)
    keys = ['task.text=["first","second"]', "data.validation=null", "evaluation.every=null"]
    run = ["training.epochs=6", "logging.rows=true", f"checkpoint.folder={tmp_path / 'run'}"]
    trainer.run(load_recipe("bert_sample", [write(tmp_path, rows), *keys, *run]))
    assert share_by_run(tmp_path / "run", flipped) >= LEAST
    assert found_share(tmp_path / "run", flipped) >= LEAST
    found = audit(str(tmp_path / "run"), (), tmp_path / "rows.csv")
    assert len([*lines(found)]) <= 15
    write_rows(found, tmp_path / "rows.csv")
    write_page(found, tmp_path / "page.html")
    with open(tmp_path / "rows.csv", newline="") as file:
        read = {int(row["row"]) - 1: row for row in csv.DictReader(file) if row["finding"] == "probably mislabelled"}
    assert len(flipped & read.keys()) > len(flipped) / 2
    number, row = next(iter(read.items()))
    assert (row["label"], row["believed"] == row["label"]) == (rows[number]["label"], False)
    # The file leaves these rows out.
    without = ["training.max_steps=1", f"checkpoint.folder={tmp_path / 'without'}"]
    leave = f"data.leave_out={tmp_path / 'rows.csv'}"
    trainer.run(load_recipe("bert_sample", [write(tmp_path, rows), *keys, *without, leave]))


@pytest.mark.nightly
def test_flipped_types_of_entities_are_the_most_suspicious(tmp_path: Path):
    """Sentences with one entity of three types, which the word decides; 5 % have another type."""
    draw = random.Random(2)
    lines_ = (ROOT / "recipes" / "sample" / "train.jsonl").read_text().splitlines()
    words = sorted({word for line in lines_ for word in json.loads(line)["text"].split() if word.isalpha()})[:360]
    entities = {kind: words[place : place + 20] for place, kind in zip((0, 20, 40), ("X", "Y", "Z"), strict=True)}
    rows: list[dict[str, Any]] = []
    for number in range(600):
        kind = "XYZ"[number % 3]
        row = draw.choices(words[60:], k=8)
        place = draw.randrange(8)
        row[place] = draw.choice(entities[kind])
        rows.append({"words": row, "label": kind, "place": place})
    flipped = flip(rows)
    for row in rows:
        kind, place = row.pop("label"), row.pop("place")
        row["tags"] = [f"B-{kind}" if number == place else "O" for number in range(8)]
    run = ["training.epochs=10", "logging.rows=true", f"checkpoint.folder={tmp_path / 'run'}"]
    keys = ["data.validation=null", "evaluation.every=null"]
    trainer.run(load_recipe("ner_sample", [write(tmp_path, rows), *keys, *run]))
    assert share_by_run(tmp_path / "run", flipped) >= LEAST
    assert found_share(tmp_path / "run", flipped) >= LEAST
    (found, *_) = audit(str(tmp_path / "run")).findings
    row = found.rows[0]
    word = rows[row.row]["words"][[tag[0] for tag in rows[row.row]["tags"]].index("B")]
    assert row.detail.lower().removesuffix(", also by the run") == f"word {word.lower()!r}"


def test_a_run_without_a_record_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match=r"logging\.rows=true"):
        audit(str(tmp_path))


@pytest.mark.parametrize(
    "text", [b"", b"{}\n", b"no json\n", b'{"version": 1, "kind": "losses", "fields": [["a", "O"]]}\n']
)
def test_a_damaged_record_is_refused(tmp_path: Path, text: bytes):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "from-000000000-rank-00000.rows").write_bytes(text)
    with pytest.raises(UsageError, match="must be a record of rows"):
        read_record(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.nightly), 2])
@pytest.mark.usefixtures("warm_python")
def test_a_killed_run_that_resumes_has_the_scores_of_a_whole_one(tmp_path: Path, ranks: int):
    keys = ["logging.rows=true", "checkpoint.every=2 steps", "training.max_steps=12"]
    recipe = write_tiny_run(tmp_path / "killed")
    program = ROOT / "tests" / "helpers" / "faulty_run.py"
    command = [sys.executable, program, "die", "0", "8", "run", recipe, *keys, "--processes", "1"]
    assert processes.finish(processes.start(command)).returncode != 0
    steps = read_record(tmp_path / "killed" / "run").records["step"]
    assert 0 < int(steps.max()) < 8  # those of the checkpoints
    command = [sys.executable, "-m", "trainer", "run", recipe, *keys, "--processes", str(ranks)]
    ended = processes.finish(processes.start(command))
    assert ended.returncode == 0, ended.stderr
    assert len({path.name.partition("-rank")[0] for path in (tmp_path / "killed" / "run" / "rows").iterdir()}) == 2
    whole = write_tiny_run(tmp_path / "whole")
    trainer.run(load_recipe(str(whole), keys))
    one, other = (read_record(tmp_path / name / "run") for name in ("killed", "whole"))
    for name in ("step", "place", "label", "believed"):
        np.testing.assert_array_equal(one.records[name], other.records[name])
    for name in ("loss", "margin"):
        np.testing.assert_allclose(one.records[name], other.records[name], atol=1e-5)
    found, expected = (audit(str(tmp_path / name / "run")).findings for name in ("killed", "whole"))
    assert [(one.name, [row.row for row in one.rows]) for one in found] == [
        (one.name, [row.row for row in one.rows]) for one in expected
    ]
