"""Retrieval of the right texts of each query among the distinct texts of a split.

The values are those of `InformationRetrievalEvaluator` of sentence-transformers with texts as the ids of the corpus.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

_PAIRS_AT_ONCE = 512  # queries that are compared with all candidates at once, which bounds the memory
_EQUAL_ANGLE = 1e-6  # radians; the rounding of fp32 states turns an embedding by some 1e-7
_EQUAL_SHARE = 1e-6  # of a score


@dataclass(frozen=True)
class Retrieval:
    """The distinct queries and candidates of a split."""

    queries: Tensor  # the embeddings of the queries `[queries, hidden]`, of length 1, in fp64
    candidates: Tensor  # the embeddings of the candidates `[candidates, hidden]`, in the order of their texts
    texts: Sequence[str]  # the texts of the candidates, sorted
    query_of: NDArray[np.int64]  # the query of each row `[rows]`
    right_of: NDArray[np.int64]  # the right candidate of each row `[rows]`

    @classmethod
    def of(cls, embeddings: Tensor, columns: Sequence[Sequence[str]]) -> Self:
        """Return the retrieval of a split.

        Args:
            embeddings: the embeddings `[rows, texts, hidden]`; equal ones for texts with the same tokens.
            columns: the texts of the rows by column: queries, right answers, and any number of wrong answers.
        """
        vectors = cls._vectors(embeddings)
        anchors, *others = (np.array(list(column), object) for column in columns)
        # Equal queries are one query with several right answers.
        _, query_at, query_of = np.unique(anchors, return_index=True, return_inverse=True)
        texts, text_at, text_of = np.unique(np.concatenate(others), return_index=True, return_inverse=True)
        candidates = vectors[:, 1:].transpose(0, 1).flatten(0, 1)[torch.from_numpy(text_at)]
        queries = vectors[torch.from_numpy(query_at), 0]
        return cls(queries, candidates, texts.tolist(), query_of, text_of[: len(anchors)])

    def ranks(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rank, from 1, of each right candidate of each query, and the number of the query, `[pairs]`."""
        # A pair that stands in several rows counts once.
        pairs = np.unique(np.stack([self.query_of, self.right_of]), axis=1)
        return self.ranks_of(*pairs), pairs[0]

    def ranks_of(self, queries: NDArray[np.int64], right: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rank, from 1, of the candidate `right[i]` for the query `queries[i]`, of shape `[pairs]`.

        Candidates at equal angles to the query stand in the order of their texts; NaN is before all numbers.
        """
        pairs = zip(*(torch.split(torch.from_numpy(of), _PAIRS_AT_ONCE) for of in (queries, right)), strict=True)
        found: NDArray[np.int64] = torch.cat([self._ranks(*pair) for pair in pairs]).numpy()
        return found

    def _ranks(self, query: Tensor, own: Tensor) -> Tensor:
        similarities, number = self._similarities(query), own[:, None]
        least, most = self._equal_to(similarities.gather(1, number))
        # Negated, so that NaN counts as higher: a broken model must not look good.
        higher, lower = ~(similarities <= most), similarities < least
        before = torch.arange(len(self.candidates)) < number
        return 1 + (higher | (before & ~lower)).sum(1)

    def nearest(self, queries: NDArray[np.int64]) -> list[str]:
        """Return the text of the candidate with rank 1 of each of the queries."""
        similarities = self._similarities(torch.from_numpy(queries))
        least, _ = self._equal_to(similarities.amax(1, keepdim=True))
        first = (similarities >= least).int().argmax(1)
        return [self.texts[number] for number in first.tolist()]

    @classmethod
    def _vectors(cls, embeddings: Tensor) -> Tensor:
        # In fp32, the first cosine below 1 is that of an angle of 3e-4; fp64 tells angles of `_EQUAL_ANGLE` apart.
        return F.normalize(embeddings.double(), dim=-1)

    def _equal_to(self, similarities: Tensor) -> tuple[Tensor, Tensor]:
        """Return the least and the largest similarity that count as equal to those given."""
        angle = similarities.acos()
        return (angle + _EQUAL_ANGLE).cos(), (angle - _EQUAL_ANGLE).clamp(min=0).cos()

    def _similarities(self, queries: Tensor) -> Tensor:
        return (self.queries[queries] @ self.candidates.T).clamp(-1, 1)


@dataclass(frozen=True)
class ScoredRetrieval(Retrieval):
    """Retrieval by scores without a bound, such as dot products; scores within a millionth are equal."""

    score: Callable[[Tensor, Tensor], Tensor] = torch.matmul  # scores of queries and candidates `[queries, candidates]`

    @classmethod
    def _vectors(cls, embeddings: Tensor) -> Tensor:
        return embeddings

    def _equal_to(self, similarities: Tensor) -> tuple[Tensor, Tensor]:
        apart = _EQUAL_SHARE * similarities.abs()
        return similarities - apart, similarities + apart

    def _similarities(self, queries: Tensor) -> Tensor:
        return self.score(self.queries[queries], self.candidates)
