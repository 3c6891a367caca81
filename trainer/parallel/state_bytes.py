"""The bytes of training state on one rank, computed by formula before a model is built.

Source: Rajbhandari et al. 2020 (arXiv:1910.02054), section 3.1. Gradients have 4 bytes per element. Parameters,
gradients and optimizer state are each whole or sharded over the shard group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from trainer.parallel.placement import SHARD_AXES

if TYPE_CHECKING:
    from trainer.parallel.placement import ParameterPlacement, Placements

_FP32_BYTES = 4


@dataclass(frozen=True)
class StateBytes:
    """The bytes on the rank that holds the most, between two steps; gradients as right before the optimizer step."""

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
    weight_bytes: Callable[[str], int],
    optimizer_bytes: Callable[[str, int], int],
) -> StateBytes:
    """Return the bytes on the rank that holds the most.

    Args:
        weight_bytes: the bytes of an element of a parameter, by its name in `placements`.
        optimizer_bytes: the bytes of the optimizer state, by the name of a parameter and its elements on the rank.
    """
    trainable = [placement for placement in placements.values() if placement.trainable]
    held = sum(placement.num_elements(sizes) * weight_bytes(name) for name, placement in placements.items())
    # Frozen parameters have no gradients.
    whole = sum(placement.num_elements(sizes) for placement in trainable)  # the part of a tensor rank

    def sharded(placement: ParameterPlacement) -> int:
        number = placement.num_elements(sizes)
        # A placement of FSDP names the data shards itself; the parts of DeepSpeed are ranges of flattened tensors.
        return number if not {*SHARD_AXES}.isdisjoint(placement.split_axes) else ceil(number / sizes["dp_shard"])

    optimizer = sum(
        optimizer_bytes(name, sharded(placement) if cut_optimizer else placement.num_elements(sizes))
        for name, placement in placements.items()
        if placement.trainable
    )
    return StateBytes(
        parameters=held,
        gradients=(sum(map(sharded, trainable)) if cut_gradients else whole) * _FP32_BYTES,
        optimizer=optimizer,
    )
