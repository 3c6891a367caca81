"""Sequences that are sharded by position over ranks.

Sequence parallelism shards them over tensor ranks, between the matrices of a layer (Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2.2). A `LayerCut` shards them over context ranks, in whole layers. With both, the tensor
ranks shard the positions of each context rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from trainer.parallel.communication import Begun, gather_sequence, join_sequence, split_sequence
from trainer.parallel.groups import Group, group_size, index_in_group
from trainer.parallel.shards.slices import bounds_of_part

SEQUENCE_DIM = 1
"""The dimension of the positions in hidden states `[batch, positions, hidden]`."""


class SequenceCut:
    """This rank's positions of the sequences in a stack of layers.

    `split` at the stack's entry sets the number of positions. A layer that is recomputed in the backward pass reads it
    here. Without pipeline stages, the backward pass of a microbatch comes before the next forward pass.

    Args:
        outer: the cut of the same stack over other ranks; this one shards the positions that it leaves to a rank.
    """

    dim = SEQUENCE_DIM

    def __init__(self, group: Group, outer: SequenceCut | None = None) -> None:
        self.group = group
        self._outer = outer
        self._total = 0

    @property
    def start(self) -> int:
        """The first position of this rank."""
        first, _ = bounds_of_part(self._total, index_in_group(self.group), group_size(self.group))
        return first + (self._outer.start if self._outer else 0)

    def split(self, x: Tensor) -> Tensor:
        """Return this rank's positions of `x` `[batch, positions, hidden]`, at the stack's entry."""
        x = self._outer.split(x) if self._outer else x
        self._total = x.shape[SEQUENCE_DIM]
        return split_sequence(x, self.group, SEQUENCE_DIM)

    def gather(self, x: Tensor, begun: Begun | None = None) -> Tensor:
        """Return all positions of these ranks, before matrices that are cut over them; see `copy_to_group`."""
        return gather_sequence(x, self.group, SEQUENCE_DIM, self._total, begun)

    def num_bytes(self, x: Tensor) -> int:
        """Return the bytes of all positions `[batch, positions, hidden]`, of which `x` has those of this rank."""
        return self._total * x.shape[0] * x.shape[-1] * x.element_size()

    def join(self, x: Tensor) -> Tensor:
        """Return all positions, at the stack's exit."""
        joined = join_sequence(x, self.group, SEQUENCE_DIM, self._total)
        return self._outer.join(joined) if self._outer else joined


class LayerCut(SequenceCut, ABC):
    """A cut in whole layers over context ranks. Attention, which needs all positions, exchanges them."""

    @abstractmethod
    def part_of_heads(self, tensor_rank: int) -> int:
        """Return the index of this rank's part of the heads, if all ranks with parts of a row's heads are counted."""

    @abstractmethod
    def cut_attention(self, module: nn.Module) -> None:
        """Let an attention module, which gets this rank's positions, attend to all of them."""
