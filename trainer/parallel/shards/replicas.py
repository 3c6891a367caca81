"""A check that ranks with the same part of a parameter hold identical bits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.base.errors import TrainerError
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.placement import Placements

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_replicas(held: Mapping[str, Tensor], placements: Placements, mesh: ParallelMesh, step: int) -> None:
    """Compare one number for each parameter over all ranks, the sum of the bits of its elements; a collective.

    Raises:
        TrainerError: two ranks differ; raised on every rank. It names the ranks and the first parameter.
    """
    if mesh.world_size == 1:
        return
    # As integers: a sum of numbers would round small differences away, and NaN is unequal to itself.
    bits = [tensor.detach().contiguous().view(_BITS[tensor.element_size()]) for tensor in held.values()]
    sums = torch.stack([tensor.sum(dtype=torch.int64) for tensor in bits]).tolist()  # the host waits once
    # Ranks with equal indices along the split axes hold the same part.
    parts = [tuple((axis, mesh.index(axis)) for axis in placements[name].split_axes) for name in held]
    gathered = mesh.gather(list(zip(held, parts, sums, strict=True)))
    mesh.on_rank_zero(lambda: _compare(gathered or [], step))


def _compare(gathered: list[list[tuple[str, tuple[tuple[str, int], ...], int]]], step: int) -> None:
    first: dict[tuple[str, tuple[tuple[str, int], ...]], tuple[int, int]] = {}  # by parameter and part: rank and sum
    differing: dict[str, set[int]] = defaultdict(set)
    for rank, rows in enumerate(gathered):
        for name, part, total in rows:
            other, expected = first.setdefault((name, part), (rank, total))
            if total != expected:
                differing[name] |= {other, rank}
    if differing:
        name, ranks = next(iter(differing.items()))
        raise TrainerError(
            f"after step {step}, ranks {', '.join(map(str, sorted(ranks)))} must hold the same part of {name}, but its"
            f" values differ ({len(differing)} parameters in all): a device or a link is damaged, or an"
            " operation is not deterministic; resume from an earlier checkpoint"
        )
