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
    assert sum(path.stat().st_size for path in SAMPLE.glob("*.jsonl")) <= 700_000
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
