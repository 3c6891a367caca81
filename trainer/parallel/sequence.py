"""Sequence parallelism: between the matrices of a layer, each tensor rank works on its positions only.

Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.2.
"""

from __future__ import annotations

from torch import Tensor

from trainer.parallel.communication import (
    Group,
    gather_sequence,
    group_size,
    in_product_type,
    index_in_group,
    join_sequence,
    split_sequence,
)
from trainer.parallel.slicing import bounds_of_part

SEQUENCE_DIM = 1
"""The dimension of the positions in hidden states `[batch, positions, hidden]`."""


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
