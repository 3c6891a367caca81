from __future__ import annotations

import itertools
import json
import re
import runpy
import sys
from collections import Counter
from pathlib import Path

import pytest
import tokenizers
import transformers

SAMPLE = Path(__file__).parents[2] / "recipes" / "sample"


def rows_of(name):
    return [json.loads(line) for line in (SAMPLE / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def train():
    return rows_of("train")


@pytest.fixture(scope="module")
def validation():
    return rows_of("validation")


def word_pairs(text):
    return set(itertools.pairwise(re.findall(r"\w+", text.lower())))


def test_size_and_shape(train, validation):
    assert sum(path.stat().st_size for path in SAMPLE.glob("*.jsonl")) <= 1_900_000
    assert len(train) >= 2000
    assert len(validation) >= 400
    assert {tuple(row) for row in train + validation} == {("text", "label")}
    assert {row["label"] for row in train} == {row["label"] for row in validation}


def test_nothing_of_the_validation_rows_is_in_the_training_rows(train, validation):
    holders: dict[tuple[str, str], set[int]] = {}
    pairs_of = [word_pairs(row["text"]) for row in train]
    for index, pairs in enumerate(pairs_of):
        for pair in pairs:
            holders.setdefault(pair, set()).add(index)
    for row in validation:
        pairs = word_pairs(row["text"])
        common = Counter(index for pair in pairs for index in holders.get(pair, ()))
        for index, count in common.most_common(5):
            assert count < 0.6 * min(len(pairs), len(pairs_of[index])), (row["text"], train[index]["text"])


def test_the_readme_states_the_facts(train, validation):
    readme = (SAMPLE / "README.md").read_text(encoding="utf-8")
    label, count = Counter(row["label"] for row in validation).most_common(1)[0]
    assert f"| {len(train):,} rows" in readme
    assert f"| {len(validation):,} rows" in readme
    assert f"(`{label}`) is right in **{100 * count / len(validation):.1f} %**" in readme
    assert "PSF-2.0" in readme


def test_the_tokenizer_is_whole_and_small(tokenizer, train):
    assert len(tokenizer) == tokenizer.vocab_size == 3000
    assert tokenizer.pad_token_id == 0
    ids = tokenizer([row["text"] for row in train])["input_ids"]
    unknown = sum(row.count(tokenizer.unk_token_id) for row in ids)
    assert unknown == 0, "every character of the training rows is in the vocabulary"
    assert max(map(len, ids)) <= tokenizer.model_max_length


def entities_of(words: list[str], tags: list[str]) -> set[tuple[int, int, str]]:
    starts = [index for index, tag in enumerate(tags) if tag.startswith("B-")]
    rest = [itertools.takewhile(lambda tag: tag.startswith("I-"), tags[start + 1 :]) for start in starts]
    return {(start, start + len(list(inside)), tags[start]) for start, inside in zip(starts, rest, strict=True)}


def test_a_dictionary_does_not_find_the_entities():
    train, validation = rows_of("entities_train"), rows_of("entities_validation")
    tags_of: dict[str, Counter[str]] = {}
    for word, tag in ((word, tag) for row in train for word, tag in zip(row["words"], row["tags"], strict=True)):
        tags_of.setdefault(word, Counter())[tag] += 1
    found = expected = both = 0
    for row in validation:
        tags = [tags_of[word].most_common(1)[0][0] if word in tags_of else "O" for word in row["words"]]
        gold, of_dictionary = entities_of(**row), entities_of(row["words"], tags)
        found, expected, both = found + len(of_dictionary), expected + len(gold), both + len(gold & of_dictionary)
    readme = (SAMPLE / "README.md").read_text(encoding="utf-8")
    assert f"entity F1 of **{2 * both / (found + expected):.2f}**" in readme
    assert f"`entities_train.jsonl` ({len(train):,} rows) and `entities_validation.jsonl` ({len(validation)})" in readme


@pytest.mark.nightly
def test_the_script_makes_the_entities_again(tmp_path, monkeypatch):
    if sys.version_info[:3] != (3, 11, 7):
        pytest.skip("made with Python 3.11.7")
    for name in ("make_sample.py", "make_entities.py"):
        (tmp_path / name).write_bytes((SAMPLE / name).read_bytes())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "make_sample", raising=False)
    runpy.run_path(str(tmp_path / "make_entities.py"), run_name="__main__")
    for split in ("train", "validation"):
        assert (tmp_path / f"entities_{split}.jsonl").read_bytes() == (SAMPLE / f"entities_{split}.jsonl").read_bytes()


@pytest.mark.nightly
def test_the_script_makes_the_files_again(tmp_path, monkeypatch):
    readme = (SAMPLE / "README.md").read_text(encoding="utf-8")
    made_with = re.search(r"Python ([\d.]+),.*tokenizers ([\d.]+), transformers ([\d.]+)\)", readme).groups()
    here = (".".join(map(str, sys.version_info[:3])), tokenizers.__version__, transformers.__version__)
    if here != made_with:
        pytest.skip(f"made with {made_with}, here are {here}")
    (tmp_path / "make_sample.py").write_bytes((SAMPLE / "make_sample.py").read_bytes())
    runpy.run_path(str(tmp_path / "make_sample.py"), run_name="__main__")
    made = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert len(made) == 8
    for path in made:
        assert path.read_bytes() == (SAMPLE / path.relative_to(tmp_path)).read_bytes(), path.name
