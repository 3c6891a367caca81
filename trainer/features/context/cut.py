"""Sequences that are cut over context ranks, in whole layers but for attention.

Sources: Jacobs et al. 2023 (arXiv:2309.14509); Liu et al. 2023 (arXiv:2310.01889); both together: Fang & Zhao 2024
(arXiv:2405.07719).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from trainer.features.context.exchange import heads_to_positions, positions_to_heads
from trainer.models.layer_hooks import change_rotations
from trainer.parallel.groups import Group, group_size, index_in_group
from trainer.parallel.random import LANES
from trainer.parallel.sharded_sequence import SEQUENCE_DIM, LayerCut
from trainer.parallel.shards.slices import bounds_of_part

_CUT = "context_cut"
"""The attribute of an attention module with its cut."""

_POSITIONS_OF_HEADS = 2  # in queries, keys and values `[batch, heads, positions, head_dim]`


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


class ContextCut(LayerCut):
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

    def part_of_heads(self, tensor_rank: int) -> int:
        # Context ranks divide the heads of a tensor rank.
        return tensor_rank * self.of_heads.heads + self.head_part

    def cut_attention(self, module: nn.Module) -> None:
        """Let an attention module exchange positions for heads, and rotate this rank's positions."""

        def cut_rotations(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            return args, change_rotations(kwargs, self.own)

        setattr(module, _CUT, self)
        module.register_forward_pre_hook(cut_rotations, with_kwargs=True)

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


def cut_of(module: nn.Module) -> ContextCut:
    """Return the cut of an attention module."""
    cut: ContextCut = getattr(module, _CUT)
    return cut
