"""A second opinion on labels: a linear model over texts, which judges each row without having learnt from it.

A run has learnt wrong labels too, above all one from random weights over many epochs. Rows are divided into five parts,
and each part is judged by a logistic regression of the other four: out-of-fold probabilities, as confident learning
needs them (Northcutt et al. 2021, arXiv:1911.00068). It needs no GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainer.tools.audit.scores import confident_issues

MOST_ROWS = 100_000
LEAST_ROWS = 50
_PARTS = 5
_MOST_CLASSES = 64
_MOST_CHARACTERS = 2000  # of a text
_LEAST = 1e-9  # probability
_STRENGTH = 4.0  # the inverse of the penalty of a regression over texts

Rows: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Fit: TypeAlias = Callable[[Any, Rows], Any]


@dataclass(frozen=True)
class Judgement:
    """The opinion on rows, each array `[rows]`.

    Attributes:
        right: the share of rows that it judges as their labels do, with all of their words.
        margin: log probability of the label minus that of the most probable other class; the smallest one of words.
        label: the class of a row, or of its word with the smallest margin.
        believed: the most probable other class.
        suspects: the rows with the smallest margins, the worst first: as many as have issues by confident learning.
        words: the word with the smallest margin; None for rows with one class.
    """

    right: float
    margin: Floats
    label: Rows
    believed: Rows
    suspects: Rows
    words: Sequence[str] | None = None

    def shown(self, row: int) -> str:
        return f"word {self.words[row]!r}" if self.words else ""


def judge_rows(columns: Sequence[Sequence[str]], labels: Rows) -> Judgement | None:
    """Judge rows with a class each; None: too few rows or classes for it.

    Args:
        columns: the texts of each column; with several, rows are also judged by that which their texts share.
        labels: the class of each row.
    """
    counts = np.bincount(labels)
    if len(labels) < LEAST_ROWS or np.count_nonzero(counts > 1) < 2 or len(counts) > _MOST_CLASSES:
        return None
    order = np.random.default_rng(0).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    parts: Rows = np.empty(len(labels), np.int64)
    parts[order] = np.arange(len(labels)) % _PARTS  # each class in all parts
    features = _of_texts(columns)
    if features is None:
        return None
    probabilities = _out_of_fold(features, labels, parts, _fit_texts)
    margin, believed = _margins(probabilities, labels)
    suspects = np.argsort(margin, kind="stable")[: np.count_nonzero(confident_issues(probabilities, labels))]
    return Judgement(float((margin > 0).mean()), margin, labels, believed, suspects)


def judge_words(rows: Sequence[Sequence[str]], tags: Sequence[Rows]) -> Judgement | None:
    """Judge rows by their words, each with a class; None: too few rows or classes for it.

    Args:
        rows: the words of each row.
        tags: the class of each word of each row.
    """
    lengths = np.array([len(row) for row in rows], np.int64)
    if len(rows) < LEAST_ROWS or not lengths.sum():
        return None
    labels = np.concatenate(tags)
    counts = np.bincount(labels)
    if np.count_nonzero(counts > 1) < 2 or len(counts) > _MOST_CLASSES:
        return None
    from sklearn.feature_extraction import FeatureHasher

    of_rows: Rows = np.repeat(np.arange(len(rows)), lengths)
    hashed = FeatureHasher(2**20, input_type="string", alternate_sign=False)
    features = hashed.transform(_features(row, place) for row in rows for place in range(len(row))).tocsr()
    parts = (np.random.default_rng(0).permutation(len(rows)) % _PARTS)[of_rows]
    probabilities = _out_of_fold(features, labels, parts, _fit_words)
    margins, believed = _margins(probabilities, labels)
    order = np.lexsort((np.arange(len(labels)), margins, of_rows))
    filled = np.flatnonzero(lengths)
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]
    worst = order[starts[filled]]  # of each row: its word with the smallest margin
    margin = np.full(len(rows), np.inf)
    margin[filled] = margins[worst]
    found: NDArray[np.int64] = np.full((2, len(rows)), -1)
    found[:, filled] = labels[worst], believed[worst]
    shown = [""] * len(rows)
    for row, word in zip(filled.tolist(), (worst - starts[filled]).tolist(), strict=True):
        shown[row] = rows[row][word]
    number = len({*of_rows[confident_issues(probabilities, labels)].tolist()})
    suspects = np.argsort(margin, kind="stable")[:number]
    return Judgement(float((margin > 0).mean()), margin, found[0], found[1], suspects, shown)


def _out_of_fold(features: Any, labels: Rows, parts: Rows, fit: Fit) -> Floats:
    """Return the probabilities of each row by a model that learnt from the other parts `[rows, classes]`."""
    found = np.zeros((len(labels), int(labels.max()) + 1))
    for part in range(_PARTS):
        held = np.flatnonzero(parts == part)
        learnt = np.flatnonzero(parts != part)
        if not len(held):
            continue
        if (labels[learnt] == labels[learnt[0]]).all():
            found[held, labels[learnt[0]]] = 1.0
        else:
            model = fit(features[learnt], labels[learnt])
            found[np.ix_(held, model.classes_)] = model.predict_proba(features[held])
    return found


def _margins(probabilities: Floats, labels: Rows) -> tuple[Floats, Rows]:
    logs = np.log(np.maximum(probabilities, _LEAST))
    rows = np.arange(len(labels))
    own = logs[rows, labels]
    logs[rows, labels] = -np.inf
    return own - logs.max(1), logs.argmax(1)


def _fit_texts(features: Any, labels: Rows) -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier

    model = LogisticRegression(C=_STRENGTH, solver="liblinear", dual=True, random_state=0)
    return OneVsRestClassifier(model).fit(features, labels)


def _fit_words(features: Any, labels: Rows) -> Any:
    from sklearn.linear_model import SGDClassifier

    model = SGDClassifier(loss="log_loss", alpha=1e-5, average=True, max_iter=5, tol=None, random_state=0)
    return model.fit(features, labels)


def _of_texts(columns: Sequence[Sequence[str]]) -> Any:
    """Return features `[rows, features]`: weights of words, pairs of words and runs of 2 to 5 characters.

    Several columns have theirs side by side, the parts that the first two share, and the cosines between these two.
    """
    from scipy import sparse
    from sklearn.feature_extraction.text import TfidfVectorizer

    texts = [[text[:_MOST_CHARACTERS] for text in column] for column in columns]
    blocks = []
    for options in (
        {"ngram_range": (1, 2), "token_pattern": r"\w+|[^\w\s]"},
        {"analyzer": "char_wb", "ngram_range": (2, 5), "min_df": 2},
    ):
        weights = TfidfVectorizer(sublinear_tf=True, dtype=np.float64, **options)
        try:
            weights.fit([text for column in texts for text in column])
        except ValueError:  # no text has a word, or none has a run twice
            continue
        found = [weights.transform(column) for column in texts]
        blocks += found
        if len(found) > 1:
            shared = found[0].minimum(found[1])
            blocks += [shared, sparse.csr_matrix(found[0].multiply(found[1]).sum(1))]
    return sparse.hstack(blocks).tocsr() if blocks else None


def _features(words: Sequence[str], place: int) -> list[str]:
    """Return the features of a word: its letters and form, and its neighbours."""

    def word(shift: int) -> str:
        return words[place + shift].lower() if 0 <= place + shift < len(words) else "^"

    def form(shift: int) -> str:
        return _form(words[place + shift]) if 0 <= place + shift < len(words) else "^"

    own = word(0)
    return [
        "bias",
        f"word {words[place][:100]}",
        *(f"{shift} {word(shift)}" for shift in (-2, -1, 0, 1, 2)),
        *(f"form {shift} {form(shift)}" for shift in (-1, 0, 1)),
        *(f"start {own[:size]}" for size in (2, 3)),
        *(f"end {own[-size:]}" for size in (2, 3)),
        *(f"run {own[start : start + 3]}" for start in range(min(len(own), 50) - 2)),
        f"before {word(-1)} {own}",
        f"after {own} {word(1)}",
        f"around {word(-1)} {word(1)}",
    ]


def _form(word: str) -> str:
    """Return the kinds of the characters of a word, runs of the same kind once."""
    kinds = "".join(
        "X" if one.isupper() else "x" if one.isalpha() else "0" if one.isdigit() else one for one in word[:50]
    )
    return re.sub(r"(.)\1+", r"\1", kinds)
