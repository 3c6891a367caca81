"""Sequences that are sharded by position over the ranks of the tensor axis.

Sequence parallelism shards them between the matrices of a layer (Korthikanti et al. 2022, arXiv:2205.05198, section
4.2.2); context parallelism in whole layers but for attention (Jacobs et al. 2023, arXiv:2309.14509).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from trainer.parallel.communication import (
    Group,
    gather_sequence,
    group_size,
    heads_to_positions,
    in_product_type,
    index_in_group,
    join_sequence,
    positions_to_heads,
    split_sequence,
)
from trainer.parallel.slicing import bounds_of_part

SEQUENCE_DIM = 1
"""The dimension of the positions in hidden states `[batch, positions, hidden]`."""

_POSITIONS_OF_HEADS = 2  # in queries, keys and values `[batch, heads, positions, head_dim]`


class SequenceCut:
    """This rank's positions of the sequences in a stack of layers.

    `split` at the stack's entry sets the number of positions. A layer that is recomputed in the backward pass reads it
    here. Without pipeline stages, the backward pass of a microbatch comes before the next forward pass.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._total = 0

    @property
    def start(self) -> int:
        """The first position of this rank."""
        return bounds_of_part(self._total, index_in_group(self.group), group_size(self.group))[0]

    def split(self, x: Tensor) -> Tensor:
        """Return this rank's positions of `x` `[batch, positions, hidden]`, at the stack's entry."""
        self._total = x.shape[SEQUENCE_DIM]
        return split_sequence(x, self.group, SEQUENCE_DIM)

    def gather(self, x: Tensor) -> Tensor:
        """Return all positions, before matrices that are cut over the ranks."""
        return gather_sequence(in_product_type(x), self.group, SEQUENCE_DIM, self._total)

    def join(self, x: Tensor) -> Tensor:
        """Return all positions, at the stack's exit."""
        return join_sequence(x, self.group, SEQUENCE_DIM, self._total)


class ContextCut(SequenceCut):
    """This rank's positions in whole layers; attention exchanges them for all positions of this rank's heads.

    Sequences are padded inside the stack, since layers of transformers fail without a position. Attention does not see
    the padding, and `join` drops it, so its gradients are 0.
    """

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._unpadded = 0

    def split(self, x: Tensor) -> Tensor:
        self._unpadded = x.shape[SEQUENCE_DIM]
        return super().split(self._padded(x, SEQUENCE_DIM))

    def join(self, x: Tensor) -> Tensor:
        return super().join(x).narrow(SEQUENCE_DIM, 0, self._unpadded)

    def own(self, x: Tensor) -> Tensor:
        """Return this rank's positions of `x` `[batch, positions, width]`, which needs no gradient."""
        start, stop = bounds_of_part(self._total, index_in_group(self.group), group_size(self.group))
        return self._padded(x, SEQUENCE_DIM).narrow(SEQUENCE_DIM, start, stop - start)

    def to_heads(self, x: Tensor) -> Tensor:
        """Return all positions of this rank's heads, before attention.

        Shapes: `[batch, heads, own positions, head_dim]`, `[batch, heads / ranks, positions, head_dim]`.
        """
        return positions_to_heads(x, self.group).narrow(_POSITIONS_OF_HEADS, 0, self._unpadded)

    def to_positions(self, x: Tensor) -> Tensor:
        """Return all heads of this rank's positions, after attention; the reverse of `to_heads`."""
        return heads_to_positions(self._padded(x, _POSITIONS_OF_HEADS), self.group)

    def _padded(self, x: Tensor, dim: int) -> Tensor:
        missing = -x.shape[dim] % group_size(self.group)
        return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing]) if missing else x
