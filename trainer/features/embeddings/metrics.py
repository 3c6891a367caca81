"""Metrics of retrieval.

The arguments are the rank of each right candidate, from 1, and the number of its query, from 0.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from trainer.tasks.metrics.metric import Metric, Values

_FIRST = 10


def _recall_at(num_candidates: int) -> Callable[[Values, Values], float]:
    """Return the mean over queries of the share of right candidates among the first `num_candidates`."""

    def recall(ranks: Values, queries: Values) -> float:
        # Right candidates among the first ones, and all of them, are counted for each query.
        found = np.bincount(queries, weights=ranks <= num_candidates)
        return float(np.mean(found / np.bincount(queries)))

    return recall


def _mrr(ranks: Values, queries: Values) -> float:
    """Return the mean over queries of 1 / rank of the first right candidate."""
    inverse = np.zeros(queries.max() + 1)
    np.maximum.at(inverse, queries, 1.0 / ranks)
    return float(np.mean(inverse))


def _ndcg(ranks: Values, queries: Values) -> float:
    """Return the mean over queries of the nDCG of the first 10 texts, in which right ones have a gain of 1."""
    numbers = np.bincount(queries)
    gains = np.bincount(queries, weights=(ranks <= _FIRST) / np.log2(ranks + 1.0))
    best = np.cumsum(1 / np.log2(np.arange(_FIRST) + 2.0))
    return float(np.mean(gains / best[np.minimum(numbers, _FIRST) - 1]))


RECALL_AT_1 = Metric(_recall_at(1))
RECALL_AT_5 = Metric(_recall_at(5))
RECALL_AT_10 = Metric(_recall_at(10))
MRR = Metric(_mrr)
NDCG = Metric(_ndcg)
