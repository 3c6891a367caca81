"""Scores of extracted answers, by the definitions of SQuAD 1.1 and 2.0.

Rajpurkar et al. 2016 (arXiv:1606.05250) and 2018 (arXiv:1806.03822); in percent, as the official scripts print them.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from trainer.tasks.metrics.metric import Metric

Accepted: TypeAlias = Sequence[str]
"""The accepted answers of a question; `[""]` if it has none."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """Return `text` in lower case, without punctuation, English articles and repeated white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def accepted_answers(texts: Sequence[str], unanswerable: bool) -> list[str]:
    """Return the answers that a prediction is compared with; SQuAD 2.0 omits answers that normalise to nothing."""
    if unanswerable:
        texts = [text for text in texts if normalised(text)]
    return list(texts) or [""]


def exact_match(predictions: Iterable[str], accepted: Iterable[Accepted]) -> float:
    """Return the percentage of predictions that equal an accepted answer after normalisation."""
    return _mean(_is_same, predictions, accepted)


def token_f1(predictions: Iterable[str], accepted: Iterable[Accepted]) -> float:
    """Return the mean F1 of the words of prediction and nearest accepted answer, in percent."""
    return _mean(_overlap, predictions, accepted)


def _among(
    metric: Callable[[Iterable[str], Iterable[Accepted]], float], answered: bool
) -> Callable[[Iterable[str], Iterable[Accepted]], float]:
    """Return the metric over the questions that have an answer, or that have none; 0 if there are none."""

    def value(predictions: Iterable[str], accepted: Iterable[Accepted]) -> float:
        kept = [pair for pair in zip(predictions, accepted, strict=True) if (list(pair[1]) != [""]) == answered]
        return metric((prediction for prediction, _ in kept), (answers for _, answers in kept))

    return value


def _mean(score: Callable[[str, str], float], predictions: Iterable[str], accepted: Iterable[Accepted]) -> float:
    scores = [max(score(p, answer) for answer in answers) for p, answers in zip(predictions, accepted, strict=True)]
    return 100.0 * sum(scores) / max(1, len(scores))


def _is_same(prediction: str, answer: str) -> float:
    return float(normalised(prediction) == normalised(answer))


def _overlap(prediction: str, answer: str) -> float:
    predicted, expected = normalised(prediction).split(), normalised(answer).split()
    common = sum((Counter(predicted) & Counter(expected)).values())
    if common == 0:
        # No words in common is right only if both sides have none.
        return float(answer == "" and not predicted)
    return 2 * common / (len(predicted) + len(expected))


EXACT_MATCH = Metric(exact_match)
TOKEN_F1 = Metric(token_f1)
HAS_ANSWER_EXACT_MATCH = Metric(_among(exact_match, answered=True))
HAS_ANSWER_F1 = Metric(_among(token_f1, answered=True))
NO_ANSWER_F1 = Metric(_among(token_f1, answered=False))
