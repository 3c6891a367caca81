"""Embeddings sharded over the tensor axis: by rows (the vocabulary) or by features."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.base.errors import UsageError
from trainer.parallel.communication import (
    Group,
    group_size,
    index_in_group,
    reduce_from_group,
    scatter_sum_sequence,
)
from trainer.parallel.placement import TENSOR_AXIS, ParameterPlacement, Placements, Split
from trainer.parallel.shards.slices import part_of


class VocabParallelEmbedding(nn.Module):
    """An `nn.Embedding` sharded over the vocabulary; each rank holds `ceil(vocab / tp)` rows of the weight.

    A rank returns zero for the ids of other ranks, so the sum over the ranks is exact. If the degree does not divide
    the vocabulary, the last rows are zeros. A decoder may share `weight` if its loss skips the padded columns, as
    `vocab_parallel_cross_entropy` does.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3; Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.

    Args:
        num_embeddings: the size of the whole vocabulary.
        embedding_dim: the size of a vector.
        group: the tensor axis.
        padding_idx: the id with a vector that gets no gradient, as in `nn.Embedding`.
        scale: the factor of the vectors.
        sequence_parallel: whether to return this rank's positions only.
        sequence_dim: the dimension of the positions in the output.
        device: the device of the weight; `meta` for a weight that is filled later.
        dtype: the type of the weight, which is not initialised.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        group: Group,
        *,
        padding_idx: int | None = None,
        scale: float = 1.0,
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if padding_idx is not None:
            assert -num_embeddings <= padding_idx < num_embeddings, f"no id is padding_idx {padding_idx}"
            padding_idx %= num_embeddings
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx
        self.scale = scale
        self.group = group
        self.sequence_parallel = sequence_parallel
        self.sequence_dim = sequence_dim
        rows = -(-num_embeddings // group_size(group))
        self.weight = nn.Parameter(torch.empty(rows, embedding_dim, device=device, dtype=dtype))

    @classmethod
    def from_whole(
        cls,
        embedding: nn.Embedding,
        group: Group,
        *,
        scale: float | None = None,
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
    ) -> VocabParallelEmbedding:
        """Return this rank's part of `embedding`, with a copy of the weight.

        Args:
            embedding: the whole embedding.
            group: the tensor axis.
            scale: the factor of the vectors, if the embedding's own `forward` multiplies them and does nothing else.
            sequence_parallel: whether to return this rank's positions only.
            sequence_dim: the dimension of the positions in the output.

        Raises:
            UsageError: the embedding has `max_norm`, `scale_grad_by_freq`, `sparse`, or its own `forward` without a
                `scale`.
        """
        _refuse_unusual(embedding, own_forward=scale is not None)
        part = cls(
            embedding.num_embeddings,
            embedding.embedding_dim,
            group,
            padding_idx=embedding.padding_idx,
            scale=1.0 if scale is None else scale,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            device="meta",
        )
        weight = embedding.weight
        held = part_of(weight.detach(), part._split, index_in_group(group), group_size(group))
        part.weight = nn.Parameter(held, requires_grad=weight.requires_grad)
        return part.train(embedding.training)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the vectors `[*, hidden]` of `ids` `[*]`; with `sequence_parallel`, those of this rank's positions.

        Raises:
            IndexError: an id is outside of the vocabulary, on every rank (on a GPU: a device-side assertion).
        """
        vectors = self._vectors(ids)
        return vectors if self.scale == 1.0 else vectors * self.scale

    def _vectors(self, ids: Tensor) -> Tensor:
        if group_size(self.group) == 1:
            return F.embedding(ids, self.weight, self.padding_idx)
        rows = self.weight.shape[0]
        first = index_in_group(self.group) * rows
        elsewhere = (ids < first) | (ids >= first + rows)
        unknown = (ids < 0) | (ids >= self.num_embeddings)
        # An unknown id reads beyond the last row, so torch raises as for a whole embedding.
        local = (ids - first).masked_fill(elsewhere, 0).masked_fill(unknown, rows)
        padding_row = None
        if self.padding_idx is not None and first <= self.padding_idx < first + rows:
            padding_row = self.padding_idx - first
        # The mask also stops the gradient of ids on other ranks, which would go to row 0.
        vectors = F.embedding(local, self.weight, padding_row).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        if self.sequence_parallel:
            return scatter_sum_sequence(vectors, self.group, self.sequence_dim)
        return reduce_from_group(vectors, self.group)

    def placements(self, prefix: str = "") -> Placements:
        """Return the placement of the weight by its name after `prefix`, which is empty or ends in a dot."""
        name = prefix + "weight"
        shape = (self.num_embeddings, self.embedding_dim)
        return {name: ParameterPlacement(name, shape, (self._split,), trainable=self.weight.requires_grad)}

    @property
    def _split(self) -> Split:
        return Split(0, TENSOR_AXIS)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, degree={group_size(self.group)}"


class FeatureParallelEmbedding(nn.Module):
    """An `nn.Embedding` sharded over its features: `[*] -> [*, features / tp]`, without communication.

    Used for one number per attention head, as in T5's relative position bias (Raffel et al. 2020, arXiv:1910.10683).
    """

    def __init__(self, weight: nn.Parameter, whole_shape: tuple[int, int], padding_idx: int | None) -> None:
        super().__init__()
        self.weight = weight
        self.whole_shape = whole_shape
        self.padding_idx = padding_idx

    @classmethod
    def from_whole(cls, embedding: nn.Embedding, group: Group) -> FeatureParallelEmbedding:
        """Return this rank's part of `embedding`, with a copy of the weight.

        Raises:
            UsageError: as for `VocabParallelEmbedding.from_whole`.
        """
        _refuse_unusual(embedding)
        rows, features = embedding.weight.shape
        size = group_size(group)
        assert features % size == 0, f"{features} features do not divide by the tensor degree {size}"
        held = part_of(embedding.weight.detach(), Split(1, TENSOR_AXIS), index_in_group(group), size)
        weight = nn.Parameter(held, requires_grad=embedding.weight.requires_grad)
        return cls(weight, (rows, features), embedding.padding_idx).train(embedding.training)

    def forward(self, ids: Tensor) -> Tensor:
        """Return this rank's features `[*, features / tp]` of the vectors of `ids` `[*]`."""
        return F.embedding(ids, self.weight, self.padding_idx)

    def placements(self, prefix: str = "") -> Placements:
        """Return the placement of the weight by its name after `prefix`, which is empty or ends in a dot."""
        name = prefix + "weight"
        split = Split(1, TENSOR_AXIS)
        return {name: ParameterPlacement(name, self.whole_shape, (split,), trainable=self.weight.requires_grad)}

    def extra_repr(self) -> str:
        rows, features = self.whole_shape
        return f"{rows}, {features}, local_features={self.weight.shape[1]}"


def _refuse_unusual(embedding: nn.Embedding, own_forward: bool = False) -> None:
    unusual = [name for name in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(embedding, name)]
    if not own_forward and type(embedding).forward is not nn.Embedding.forward:
        unusual.append(f"the forward of {type(embedding).__name__}")
    if unusual:
        raise UsageError(
            f"an embedding with {' and '.join(unusual)} cannot be cut over tensor ranks; use a tensor degree of 1"
        )
