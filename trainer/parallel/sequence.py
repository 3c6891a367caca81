"""Sequence parallelism: between the matrices of a layer, each tensor rank works on its positions only.

Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.2.
"""

from __future__ import annotations

from torch import Tensor

from trainer.parallel.communication import (
    Group,
    gather_sequence,
    group_size,
    index_in_group,
    join_sequence,
    split_sequence,
)
from trainer.parallel.slicing import bounds_of_part

SEQUENCE_DIM = 1
"""Of the positions, in hidden states `[batch, positions, hidden]`."""


class SequenceCut:
    """Which positions of the sequences that are now in a stack of layers this rank holds.

    How many positions there are is known at the stack's entry only; a layer that is computed again in the backward pass
    still finds them here, because without pipeline stages the backward pass of a microbatch comes before the forward
    pass of the next.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._total = 0

    @property
    def start(self) -> int:
        """This rank's first position."""
        return bounds_of_part(self._total, index_in_group(self.group), group_size(self.group))[0]

    def split(self, x: Tensor) -> Tensor:
        """At the stack's entry: this rank's positions of `x` `[batch, positions, hidden]`, which all ranks have."""
        self._total = x.shape[SEQUENCE_DIM]
        return split_sequence(x, self.group, SEQUENCE_DIM)

    def gather(self, x: Tensor) -> Tensor:
        """Before matrices that the ranks share out: all positions."""
        return gather_sequence(x, self.group, SEQUENCE_DIM, self._total)

    def join(self, x: Tensor) -> Tensor:
        """At the stack's exit: all positions, for what every rank computes."""
        return join_sequence(x, self.group, SEQUENCE_DIM, self._total)
