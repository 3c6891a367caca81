"""The judge of labels: out-of-fold probabilities beside scikit-learn's, and odd rows."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from sklearn.model_selection import PredefinedSplit, cross_val_predict

from trainer.tools.audit import judge
from trainer.tools.audit.judge import judge_rows, judge_words

WORDS = {0: ["red", "green", "blue"], 1: ["one", "two", "three"]}


def rows(number: int, seed: int = 0) -> tuple[list[str], Any]:
    draw = random.Random(seed)
    labels = np.array([row % 2 for row in range(number)])
    return [" ".join(draw.choices([*WORDS[label], "the", "a"], k=8)) for label in labels], labels


def test_flipped_rows_have_the_smallest_margins():
    texts, labels = rows(120)
    labels[[5, 40, 77]] ^= 1
    found = judge_rows([texts], labels)
    assert found is not None
    assert {*found.suspects.tolist()} == {5, 40, 77}
    assert 0.95 < found.right == (found.margin > 0).mean() <= 117 / 120
    assert (found.believed != labels).all()


def test_probabilities_are_out_of_fold(monkeypatch: pytest.MonkeyPatch):
    texts, labels = rows(60)
    labels[::7] ^= 1
    seen: list[Any] = []
    learn = judge._out_of_fold
    monkeypatch.setattr(judge, "_out_of_fold", lambda *given: seen.append((given, learn(*given))) or seen[-1][1])
    judge_rows([texts], labels)
    ((features, _, parts, _), probabilities) = seen[0]
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier

    model = OneVsRestClassifier(LogisticRegression(C=4.0, solver="liblinear", dual=True, random_state=0))
    expected = cross_val_predict(model, features, labels, cv=PredefinedSplit(parts), method="predict_proba")
    np.testing.assert_allclose(probabilities, expected, atol=1e-6)


def test_the_wrong_word_of_a_sentence_is_named():
    draw = random.Random(1)
    words = [draw.choices([*WORDS[0], *WORDS[1], "the", "a"], k=6) for _ in range(80)]
    tags = [np.array([int(word in WORDS[1]) for word in row]) for row in words]
    words[3], tags[3] = [], np.array([], np.int64)  # an empty row
    place = next(place for place, word in enumerate(words[9]) if word in WORDS[1])
    tags[9][place] = 0
    found = judge_words(words, tags)
    assert found is not None
    assert found.suspects.tolist() == [9]
    assert found.shown(9) == f"word {words[9][place]!r}"
    assert (found.label[9], found.believed[9]) == (0, 1)
    assert found.margin[3] == np.inf


def test_what_two_texts_share_decides():
    draw = random.Random(2)
    names = [f"w{number}" for number in range(200)]
    first = [" ".join(draw.sample(names, 8)) for _ in range(200)]
    labels = np.array([row % 2 for row in range(200)])
    second = [text if label else " ".join(draw.sample(names, 8)) for text, label in zip(first, labels, strict=True)]
    labels[[4, 9]] ^= 1
    found = judge_rows([first, second], labels)
    assert found is not None
    assert {*found.suspects.tolist()} == {4, 9}


@pytest.mark.parametrize(
    ("texts", "labels"),
    [
        (["a b"] * 7, [0, 1] * 3 + [0]),  # too few rows
        (["a b"] * 60, [0] * 60),  # one class
        (["a b"] * 60, [0] * 59 + [1]),  # and one row of another one
        ([""] * 60, [0, 1] * 30),  # no word
        (["a b"] * 130, list(range(65)) * 2),  # too many classes
    ],
)
def test_some_rows_have_no_judge(texts: list[str], labels: list[int]):
    assert judge_rows([texts], np.array(labels)) is None


def test_odd_rows_are_judged():
    texts, labels = rows(60)
    texts[:4] = ["", "\ud800 \x00", "x" * 100_000, "=1+1"]
    labels[7] = 2  # a class with one row
    found = judge_rows([texts], labels)
    assert found is not None
    assert np.isfinite(found.margin).all()
    tags = [np.array([0, 0])] * 59 + [np.array([1, 1])]  # one part alone has a class
    assert judge_words([["a", "b"]] * 60, tags) is not None
    assert judge_words([[]] * 60, [np.array([], np.int64)] * 60) is None
