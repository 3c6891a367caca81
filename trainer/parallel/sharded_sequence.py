"""Sequences that are sharded by position over ranks.

Sequence parallelism shards them over tensor ranks, between the matrices of a layer (Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2.2). Context parallelism shards them over context ranks, in whole layers but for attention
(Jacobs et al. 2023, arXiv:2309.14509; Liu et al. 2023, arXiv:2310.01889; both together: Fang & Zhao 2024,
arXiv:2405.07719). With both, the tensor ranks shard the positions of each context rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import gcd

from torch import Tensor
from torch.nn import functional as F

from trainer.parallel.communication import (
    gather_sequence,
    heads_to_positions,
    in_product_type,
    join_sequence,
    positions_to_heads,
    split_sequence,
)
from trainer.parallel.groups import Group, group_size, index_in_group
from trainer.parallel.random import LANES
from trainer.parallel.shards.slices import bounds_of_part

SEQUENCE_DIM = 1
"""The dimension of the positions in hidden states `[batch, positions, hidden]`."""

_POSITIONS_OF_HEADS = 2  # in queries, keys and values `[batch, heads, positions, head_dim]`


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

    def gather(self, x: Tensor) -> Tensor:
        """Return all positions of these ranks, before matrices that are cut over them."""
        # Rounded before it is sent, since the products would round it anyway.
        return gather_sequence(in_product_type(x), self.group, SEQUENCE_DIM, self._total)

    def join(self, x: Tensor) -> Tensor:
        """Return all positions, at the stack's exit."""
        joined = join_sequence(x, self.group, SEQUENCE_DIM, self._total)
        return self._outer.join(joined) if self._outer else joined


@dataclass(frozen=True)
class ContextSplit:
    """The work of the context ranks in attention: each `heads` consecutive ranks share the heads of one block.

    The ranks with the same heads form a ring of `ring` ranks, in which keys and values go around.
    """

    heads: int
    ring: int

    @classmethod
    def of(cls, degree: int, numbers_of_heads: Iterable[int]) -> ContextSplit:
        """Return the split with the most ranks over the heads; each of `numbers_of_heads` is divisible by them."""
        # Queries and keys may have different numbers of heads, and the ranks must divide each of them.
        heads = gcd(degree, *numbers_of_heads)
        return cls(heads, degree // heads)

    def __str__(self) -> str:
        if self.ring == 1:
            return f"{self.heads} head groups"
        return f"{self.heads} head group{'s' * (self.heads > 1)} x ring of {self.ring}"


class ContextCut(SequenceCut):
    """This rank's positions in whole layers; attention exchanges them for more positions of this rank's heads.

    The ranks that share heads exchange their positions, which together are a block. Blocks go around the ring, if it
    has several ranks.

    Sequences are padded inside the stack, since layers of transformers fail without a position. Attention does not see
    the padding, and `join` drops it, so its gradients are 0.
    """

    def __init__(self, group: Group, split: ContextSplit) -> None:
        super().__init__(group)
        assert split.heads * split.ring == group_size(group), "the split is for another number of ranks"
        self.of_heads = split
        # Words of dropout masks begin at each block, as the fused kernel needs it.
        self._multiple = group_size(group) * (LANES // gcd(LANES, split.heads) if split.ring > 1 else 1)
        self._unpadded = 0

    @property
    def head_part(self) -> int:
        """The index of this rank's part of the heads."""
        return index_in_group(self.group) % self.of_heads.heads

    @property
    def block(self) -> int:
        """The index of this rank's block of positions."""
        return index_in_group(self.group) // self.of_heads.heads

    @property
    def blocks(self) -> list[range]:
        """The positions of each block, without padding; the last ones may have none."""
        length = self._total // self.of_heads.ring
        # The padding is at the end of the sequence, so only the last blocks are shorter.
        edges = [min(number * length, self._unpadded) for number in range(self.of_heads.ring + 1)]
        return [range(start, stop) for start, stop in pairwise(edges)]

    def split(self, x: Tensor) -> Tensor:
        self._unpadded = x.shape[SEQUENCE_DIM]
        return super().split(_padded(x, SEQUENCE_DIM, -(-self._unpadded // self._multiple) * self._multiple))

    def join(self, x: Tensor) -> Tensor:
        return super().join(x).narrow(SEQUENCE_DIM, 0, self._unpadded)

    def own(self, x: Tensor) -> Tensor:
        """Return this rank's positions of `x` `[batch, positions, width]`, which needs no gradient."""
        start, stop = bounds_of_part(self._total, index_in_group(self.group), group_size(self.group))
        return _padded(x, SEQUENCE_DIM, self._total).narrow(SEQUENCE_DIM, start, stop - start)

    def to_heads(self, x: Tensor) -> Tensor:
        """Return this rank's block and heads, before attention; without a ring, the block has all positions.

        Shapes: `[batch, heads, own positions, head_dim]`, `[batch, own heads, positions of the block, head_dim]`. A
        block that goes around a ring keeps its padding, so all blocks are of one length.
        """
        block = positions_to_heads(x, self.group, self.of_heads.heads)
        return block if self.of_heads.ring > 1 else block.narrow(_POSITIONS_OF_HEADS, 0, self._unpadded)

    def to_positions(self, x: Tensor) -> Tensor:
        """Return all heads of this rank's positions, after attention; the reverse of `to_heads`."""
        # Attention returns no padding, but ranks exchange parts of equal size.
        block = _padded(x, _POSITIONS_OF_HEADS, self._total // self.of_heads.ring)
        return heads_to_positions(block, self.group, self.of_heads.heads)


def _padded(x: Tensor, dim: int, length: int) -> Tensor:
    missing = length - x.shape[dim]
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing]) if missing else x
