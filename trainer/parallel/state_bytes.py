"""The bytes of training state that one rank holds, by formula: what a layout costs before anything is built.

Rajbhandari et al. 2020 (arXiv:1910.02054), section 3.1, in fp32: parameters, gradients and optimizer state of 4 bytes
an element each, every one of them whole or cut over the shard group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.parallel.placement import Placements

_FP32_BYTES = 4


@dataclass(frozen=True)
class StateBytes:
    """Of the rank that holds the most, between two steps; gradients as they are right before the optimizer step."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def state_bytes(
    placements: Placements,
    sizes: Mapping[str, int],
    *,
    cut_gradients: bool,
    cut_optimizer: bool,
    optimizer_tensors: int,
) -> StateBytes:
    """The bytes by formula.

    Args:
        placements: how the parameters lie.
        sizes: of each mesh axis.
        cut_gradients: whether gradients are cut over the shard group, as the parameters may be.
        cut_optimizer: likewise for the optimizer state.
        optimizer_tensors: tensors of the parameter's size that the optimizer keeps for each (AdamW: 2; 3 where a master
            copy of the cut parameter is kept beside it, as DeepSpeed does).
    """
    trainable = [placement for placement in placements.values() if placement.trainable]
    held = sum(placement.num_elements(sizes) for placement in placements.values())
    whole = sum(placement.num_elements(sizes) for placement in trainable)  # of what the tensor axis leaves to this rank
    part = sum(
        placement.num_elements(sizes)
        if "dp_shard" in placement.split_axes
        else ceil(placement.num_elements(sizes) / sizes["dp_shard"])
        for placement in trainable
    )
    return StateBytes(
        parameters=held * _FP32_BYTES,
        gradients=(part if cut_gradients else whole) * _FP32_BYTES,
        optimizer=(part if cut_optimizer else whole) * optimizer_tensors * _FP32_BYTES,
    )
