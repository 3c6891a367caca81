"""The numbers of a tensor: how many elements, the sum of squares, and projections on fixed pseudo-random directions.

They are sums over elements, in fp64. Each coefficient is a function of the place of its element in the whole tensor.
So the numbers of shards add up to those of the whole tensor, and padding adds nothing. The mean square difference of
the projections of two tensors estimates the square of their distance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod

import torch
from torch import Tensor

from trainer.parallel.random import LANE_LEVELS, LANES, derive_keys, stream_key
from trainer.parallel.shards.boxes import Box, TensorPart, positions_of

NUMBERS = 2 + LANES
"""The number of elements, the sum of squares, and four projections."""

_CHUNK_ELEMENTS = 1 << 20
_STREAM = cache(stream_key)


def coefficients(stream: str, places: Tensor) -> Tensor:
    """Return pseudo-random numbers with mean 0 and variance 1 for places `[n]` (int64): fp64 `[n, 4]`."""
    words = derive_keys(torch.tensor(_STREAM(stream), device=places.device), places)
    lanes = words.contiguous().view(torch.int16).view(-1, LANES).double()
    return (lanes + 0.5) * (12**0.5 / LANE_LEVELS)


@dataclass(frozen=True)
class Tokens:
    """The tokens of an output: where they lie in it, and in the rows of the microbatch."""

    chosen: Tensor  # whether a place of the flattened output holds a token, bool `[places]`
    rows: Tensor  # the row of each token in the microbatch, int64 `[tokens]`
    positions: Tensor  # the position of each token in its row, int64 `[tokens]`
    num_rows: int

    def numbers(self, output: Tensor, features: Tensor) -> Tensor:
        """Return the numbers of each row, fp64 `[rows, 6]`.

        Args:
            output: the output `[..., width]`.
            features: the place of each feature in the whole output, int64 `[width]`; -1 for padding.
        """
        kept = features >= 0
        of_tokens = output.detach().reshape(-1, output.shape[-1])[self.chosen][:, kept].double()
        projected = of_tokens @ coefficients("feature", features[kept]) * coefficients("position", self.positions)
        elements = torch.full_like(projected[:, :1], int(kept.sum()))
        numbers = torch.cat([elements, of_tokens.square().sum(1, keepdim=True), projected], dim=1)
        return numbers.new_zeros(self.num_rows, NUMBERS).index_add_(0, self.rows, numbers)


def of_part(part: TensorPart, before: Mapping[int, Tensor] | None = None) -> list[float]:
    """Return the numbers of a rank's part of a tensor, or of its change.

    Args:
        before: the values before the change, by the index of the box.
    """
    total = torch.zeros(NUMBERS, dtype=torch.float64)
    for index, box in enumerate(part.boxes):
        total += _of_box(box, part.shape, None if before is None else before[index])
    return total.tolist()


def _of_box(box: Box, shape: tuple[int, ...], before: Tensor | None) -> Tensor:
    total = torch.zeros(NUMBERS, dtype=torch.float64, device=box.view.device)
    rows = max(1, _CHUNK_ELEMENTS // max(1, prod(box.shape[1:])))
    for first in range(0, box.shape[0] if box.shape else 1, rows):
        cut = slice(first, first + rows) if box.shape else ...
        piece = box.view[cut].detach().double()
        if before is not None:
            piece = piece - before[cut].double()
        start = (box.start[0] + first, *box.start[1:]) if box.shape else ()
        places = positions_of(start, piece.shape, shape, piece.device)
        flat = piece.reshape(-1)
        total[0] += flat.numel()
        total[1] += flat.square().sum()
        total[2:] += flat @ coefficients("element", places)
    return total.cpu()
