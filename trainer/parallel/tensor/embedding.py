"""Embeddings that are sharded by rows (the vocabulary), or by features over the tensor axis."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from trainer.base.errors import UsageError
from trainer.parallel.communication import reduce_in_place
from trainer.parallel.groups import Group, group_size, index_in_group
from trainer.parallel.placement import ROWS_AXIS, TENSOR_AXIS, ParameterPlacement, Placements, Split
from trainer.parallel.shards.slices import part_of
from trainer.parallel.tensor.kinds import ShardedEmbedding
from trainer.parallel.tensor.trained_rows import VectorScale, attach_rows, rows_of


class _ParallelEmbedding(ShardedEmbedding):
    """This rank's part of a whole embedding, with a copy of its weight; the copy keeps `requires_grad`.

    Args:
        has_own_forward: whether the caller knows the `forward` of the embedding's class.

    Raises:
        UsageError: the embedding has `max_norm`, `scale_grad_by_freq`, `sparse`, or an unknown `forward`.
    """

    def __init__(self, whole: nn.Embedding, split: Split, group: Group, has_own_forward: bool = False) -> None:
        super().__init__()
        unusual = [name for name in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(whole, name)]
        if not has_own_forward and type(whole).forward is not nn.Embedding.forward:
            unusual.append(f"the forward of {type(whole).__name__}")
        if unusual:
            raise UsageError(
                f"`parallel.tensor` must be 1, because an embedding with {' and '.join(unusual)} cannot be cut over"
                " ranks; use `parallel.strategy` fsdp to shard it"
            )
        self.num_embeddings, self.embedding_dim = whole.num_embeddings, whole.embedding_dim
        self.padding_idx = whole.padding_idx
        self.group = group
        self._split = split
        part = part_of(whole.weight.detach(), split, index_in_group(group), group_size(group))
        self.weight = nn.Parameter(part, requires_grad=whole.weight.requires_grad)
        if (rows := rows_of(whole)) is not None:
            attach_rows(self, rows.copy(group, len(part)))
        self.train(whole.training)

    def placements(self, prefix: str = "") -> Placements:
        """Return the placement of the weight by its name after `prefix`, which is empty or ends in a dot."""
        name, shape = f"{prefix}weight", (self.num_embeddings, self.embedding_dim)
        return {name: ParameterPlacement(name, shape, (self._split,), trainable=self.weight.requires_grad)}

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, degree={group_size(self.group)}"


class VocabParallelEmbedding(_ParallelEmbedding):
    """An `nn.Embedding` sharded over the vocabulary; each of n ranks holds `ceil(vocab / n)` rows of the weight.

    A rank returns zero for the ids of other ranks, so the sum over the ranks is exact. If the degree does not divide
    the vocabulary, the last rows are zeros. A decoder may share `weight` if its loss skips the padded columns, as
    `vocab_parallel_cross_entropy` does.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.

    Args:
        scale: the factor of the vectors, if the embedding's own `forward` multiplies them and does nothing else; None:
            its `forward` is unknown.

    Raises:
        UsageError: see `_ParallelEmbedding`.
    """

    def __init__(self, whole: nn.Embedding, group: Group, *, scale: VectorScale | None = None) -> None:
        super().__init__(whole, Split(0, ROWS_AXIS), group, has_own_forward=scale is not None)
        self.scale = scale or VectorScale()

    def forward(self, ids: Tensor) -> Tensor:
        """Return the vectors `[*, hidden]` of `ids` `[*]`.

        Raises:
            IndexError: an id is outside of the vocabulary, on every rank (on a GPU: a device-side assertion).
        """
        return self.scale(self._vectors(ids))

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
        return reduce_in_place(vectors, self.group)


class FeatureParallelEmbedding(_ParallelEmbedding):
    """An `nn.Embedding` sharded over its features: `[*] -> [*, features / tp]`, without communication.

    Used for one number per attention head, as in T5's relative position bias (Raffel et al. 2020, arXiv:1910.10683).
    """

    def __init__(self, whole: nn.Embedding, group: Group) -> None:
        size = group_size(group)
        assert whole.embedding_dim % size == 0, (
            f"{whole.embedding_dim} features do not divide by the tensor degree {size}"
        )
        super().__init__(whole, Split(1, TENSOR_AXIS), group)

    def forward(self, ids: Tensor) -> Tensor:
        """Return this rank's features `[*, features / tp]` of the vectors of `ids` `[*]`."""
        return F.embedding(ids, self.weight, self.padding_idx)
