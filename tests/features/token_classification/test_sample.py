"""The rows of `ner_sample`: the facts of their README, and the script that makes them."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.remade import assert_makes_again

ROOT = Path(__file__).parents[3]
SAMPLE = ROOT / "trainer" / "features" / "token_classification" / "recipes"


def rows_of(name):
    return [json.loads(line) for line in (SAMPLE / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def entities_of(words: list[str], tags: list[str]) -> set[tuple[int, int, str]]:
    starts = [index for index, tag in enumerate(tags) if tag.startswith("B-")]
    rest = [itertools.takewhile(lambda tag: tag.startswith("I-"), tags[start + 1 :]) for start in starts]
    return {(start, start + len(list(inside)), tags[start]) for start, inside in zip(starts, rest, strict=True)}


def test_a_dictionary_does_not_find_the_entities():
    train, validation = rows_of("train"), rows_of("validation")
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
    assert f"`train.jsonl` ({len(train):,} rows) and `validation.jsonl` ({len(validation)})" in readme


@pytest.mark.nightly
def test_the_script_makes_the_entities_again(tmp_path):
    assert_makes_again(Path(__file__).with_name("make_entities.py"), SAMPLE, tmp_path)
