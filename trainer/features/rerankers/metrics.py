"""Metrics of ranked documents, with the values of `CrossEncoderRerankingEvaluator` of sentence-transformers.

The arguments are one array of scores and one of relevances for each query, `[documents]`. A document is relevant if its
number is above 0. A query without relevant documents counts as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.tasks.metrics.metric import Metric

Lists = Sequence[NDArray[Any]]


def _mean(of_query: Callable[[NDArray[Any], NDArray[Any]], float]) -> Callable[[Lists, Lists], float]:
    def mean(scores: Lists, relevances: Lists) -> float:
        pairs = zip(scores, relevances, strict=True)
        return float(np.mean([of_query(*pair) if (pair[1] > 0).any() else 0.0 for pair in pairs]))

    return mean


def _ndcg_at(number: int) -> Callable[[Lists, Lists], float]:
    """Return the mean nDCG (Järvelin and Kekäläinen 2002) of the first `number`; equal scores share their gains."""

    def ndcg(scores: NDArray[Any], relevances: NDArray[Any]) -> float:
        from sklearn.metrics import ndcg_score

        if len(scores) == 1:  # scikit-learn refuses it
            return 1.0
        return float(ndcg_score([relevances], [scores], k=number))

    return _mean(ndcg)


def _mrr_at(number: int) -> Callable[[Lists, Lists], float]:
    """Return the mean reciprocal rank of the first relevant document, after wrong ones with an equal score."""

    def reciprocal(scores: NDArray[Any], relevances: NDArray[Any]) -> float:
        rank = 1 + int((scores[relevances <= 0] >= scores[relevances > 0].max()).sum())
        return 1 / rank if rank <= number else 0.0

    return _mean(reciprocal)


def _average_precision(scores: NDArray[Any], relevances: NDArray[Any]) -> float:
    from sklearn.metrics import average_precision_score

    return float(average_precision_score(relevances > 0, scores))


NDCG_AT_5 = Metric(_ndcg_at(5))
NDCG_AT_10 = Metric(_ndcg_at(10))
MRR_AT_5 = Metric(_mrr_at(5))
MRR_AT_10 = Metric(_mrr_at(10))
MAP = Metric(_mean(_average_precision))
