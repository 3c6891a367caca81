"""The audit of data: planted rows are found, others are not, and near duplicates are those of brute force."""

from __future__ import annotations

import csv
import json
import random
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from trainer.base.text import for_terminal
from trainer.recipe.reading.loading import load_recipe
from trainer.tasks.registry import build_task
from trainer.tools.audit import near_duplicates
from trainer.tools.audit.audit import audit
from trainer.tools.audit.characters import damage, script
from trainer.tools.audit.data_audit import fences
from trainer.tools.audit.findings import AuditResult, Finding, FoundRow, lines, write_page, write_rows
from trainer.tools.audit.row_texts import flat
from trainer.training.run_data import read_splits

WORDS = [
    f"{stem}{end}" for stem in ("fa", "lo", "mi", "re", "su", "ti", "ka", "no") for end in ("ban", "der", "gul", "tis")
]


def sentence(draw: random.Random, number: int = 12) -> str:
    return " ".join(draw.choices(WORDS, k=number))


def planted(folder: Path) -> AuditResult:
    draw = random.Random(3)
    rows = [{"text": sentence(draw), "label": "ab"[number % 2]} for number in range(200)]
    held = [{"text": sentence(draw), "label": "ab"[number % 2]} for number in range(20)]
    rows[10]["text"] = "x"
    rows[20] = dict(rows[5])
    rows[30] = {"text": rows[6]["text"], "label": {"a": "b", "b": "a"}[rows[6]["label"]]}
    rows[40]["text"] = rows[7]["text"] + " extra"
    rows[50]["text"] = held[3]["text"]
    rows[60]["text"] = "größer für ".encode().decode("cp1252") + rows[60]["text"]
    rows[70]["text"] = "это предложение написано другими буквами чем все остальные строки здесь"
    rows[80]["text"] = sentence(draw, 900)
    rows[90]["label"] = "c"
    rows[95]["text"] += " \x07\x1b[31m"
    for name, values in (("train", rows), ("held", held)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in values))
    return audit("bert_sample", [f"data.train={folder}/train.jsonl", f"data.validation={folder}/held.jsonl"])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> AuditResult:
    return planted(tmp_path_factory.mktemp("planted"))


EXPECTED = {
    "very short": {10},
    "exact duplicate": {20},
    "other label": {6, 30},
    "in validation": {50},
    "damaged text": {60, 95},
    "unusual script": {70},
    "very long": {80},
    "truncated": {80},
    "rare class": {90},
}


def test_each_planted_row_is_found_and_no_other(found: AuditResult):
    rows = {one.name: {row.row for row in one.rows} for one in found.findings if one.split == "training"}
    if near_duplicates.is_installed():
        assert rows.pop("near duplicate") == {40}
    assert rows == EXPECTED
    assert {one.split for one in found.findings} == {"training"}


def test_the_terminal_has_15_lines_without_control_characters(found: AuditResult):
    shown = [*lines(found)]
    assert len(shown) <= 15
    assert all(line.isprintable() for line in shown)
    assert shown[0].startswith("bert_sample: ")


def test_the_file_of_rows_feeds_the_key(found: AuditResult, tmp_path: Path):
    write_rows(found, tmp_path / "rows.csv")
    write_page(found, tmp_path / "page.html")
    with open(tmp_path / "rows.csv", newline="") as file:
        read = list(csv.DictReader(file))
    assert {int(row["row"]) - 1 for row in read if row["finding"] == "other label"} == {6, 30}
    assert "very short" in (tmp_path / "page.html").read_text()
    text = (tmp_path / "page.html").read_text()
    assert "\x1b" not in text
    assert json.loads(json.dumps(found.as_object()))["rows"] == {"training": 200, "validation": 20}


def test_no_cell_of_the_file_is_a_formula_of_a_spreadsheet(tmp_path: Path):
    texts = ['=HYPERLINK("http://x","a")', "+1", "-2+3", "@SUM(A1)", "\t=1", "\uff1d1", 'a","=1', "plain"]
    rows = [FoundRow("training", place, text, text, text, -0.5, text, "ab") for place, text in enumerate(texts)]
    result = AuditResult("x", {"training": 9}, [Finding("very short", "training", "", len(rows), rows)])
    write_rows(result, tmp_path / "rows.csv")
    with open(tmp_path / "rows.csv", newline="") as file:
        read = list(csv.DictReader(file))
    for text, row in zip(texts, read, strict=True):
        guarded = text if text in ('a","=1', "plain") else "'" + for_terminal(text)
        assert {row[name] for name in ("detail", "label", "believed", "text")} == {guarded}
        assert (row["score"], row["digest"]) == ("-0.5", "ab")
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"text": text, "label": "a"}) + "\n" for text in "abcdefghij")
    )
    (tmp_path / "rows.csv").write_text((tmp_path / "rows.csv").read_text().replace('"ab"', '""'))
    keys = [f"data.train={tmp_path}/train.jsonl", "data.validation=null", f"data.leave_out={tmp_path}/rows.csv"]
    recipe = load_recipe("bert_sample", [*keys, "evaluation.every=null"]).recipe
    kept = read_splits(recipe, build_task(recipe.task), None, None, None).train.rows["text"]
    assert list(kept) == ["i", "j"]


def test_without_the_package_a_note_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(near_duplicates, "is_installed", lambda: False)
    found = planted(tmp_path)
    assert "near duplicates were not looked for" in found.notes[0]
    assert "near duplicate" not in {one.name for one in found.findings}


def test_near_duplicates_are_those_of_brute_force():
    pytest.importorskip("datasketch")
    draw = random.Random(1)
    texts = [sentence(draw, 30) for _ in range(150)]
    for place in range(100, 150):  # changed in one to six words
        words = texts[place - 100].split()
        for _ in range(draw.randint(1, 6)):
            words[draw.randrange(30)] = "other"
        texts[place] = " ".join(words)

    def runs(text: str) -> set[str]:
        words = text.split()
        return {" ".join(words[place : place + 3]) for place in range(len(words) - 2)}

    sets = [runs(text) for text in texts]
    expected = {
        (first, second)
        for first, second in combinations(range(150), 2)
        if len(sets[first] & sets[second]) / len(sets[first] | sets[second]) >= 0.8
    }
    assert len(expected) > 5
    pairs = near_duplicates.candidates(near_duplicates.bands(texts))
    kept, _ = near_duplicates.near(pairs, lambda numbers: [texts[number] for number in numbers])
    assert {tuple(pair) for pair in kept.tolist()} == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("plain", ""),
        ("naïve Ärger, 3 °C \u2013 œuvre", ""),
        ("naÃ¯ve", "UTF-8 read as another encoding"),
        ("donâ€™t", "UTF-8 read as another encoding"),
        ("lost \ufffd", "replacement character"),
        ("bell \x07", "control character"),
        ("two\nlines\t.", ""),
    ],
)
def test_damage(text: str, problem: str):
    assert damage(text) == problem


def test_the_script_is_that_of_most_letters():
    assert [script(text) for text in ("abc", "абв a", "日本語", "12 ?!", "")] == ["LATIN", "CYRILLIC", "CJK", "", ""]


def test_the_fences_are_three_interquartile_ranges_of_logarithms_away():
    low, high = fences(np.array([10, 20, 40, 80, 160]))
    assert low == pytest.approx(20 / 4**3)
    assert high == pytest.approx(80 * 4**3)


def test_a_chat_is_the_text_of_its_messages():
    assert flat([{"role": "user", "content": "one"}, {"role": "assistant", "content": [{"text": "two"}]}]) == "one\ntwo"


@pytest.mark.parametrize("rows", [[{"text": "one row", "label": "a"}, {"text": "two", "label": "b"}]])
def test_few_rows_without_validation(tmp_path: Path, rows: list[dict[str, str]]):
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = audit("bert_sample", [f"data.train={tmp_path}/few.jsonl", "data.validation=null", "evaluation.every=null"])
    assert found.sizes == {"training": 2}


def test_tags_of_words_are_no_classes_of_rows(tmp_path: Path):
    rows = [{"words": ["call", f"name{number}"], "tags": ["O", "B-X" if number else "B-Y"]} for number in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = [f"data.train={tmp_path}/rows.jsonl", "data.validation=null", "evaluation.every=null"]
    assert "rare class" not in {one.name for one in audit("ner_sample", data).findings}


def test_answers_in_prompts(tmp_path: Path):
    rows = [{"prompt": f"question {n} of many", "completion": f"the answer to number {n}"} for n in range(30)]
    rows[4]["prompt"] += ", hint: the answer to number 4"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = ["task.text=null", "task.prompt=prompt", "task.completion=completion", "task.packing=none"]
    keys += [f"data.train={tmp_path}/rows.jsonl", "data.validation=null", "evaluation.every=null"]
    load_recipe("gpt2_sample", keys)
    found = audit("gpt2_sample", keys)
    rows_of = {one.name: [row.row for row in one.rows] for one in found.findings}
    assert rows_of["answer in prompt"] == [4]
