"""Codes of 8 bits for the moments of AdamW: the dynamic map of Dettmers et al. 2022, arXiv:2110.02861, section 2.1."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

FIRST, SECOND = "exp_avg_codes", "exp_avg_sq_codes"
"""The keys of the codes of both moments in the state of a large parameter."""
INDEX_BITS, LOW_BITS = 18, 14
"""The bits of fp32 that determine a code, sign, exponent and 9 bits of the fraction; and the rest."""

_DECADES = 7  # powers of ten that a code distinguishes; the largest has half of all codes


@dataclass(frozen=True)
class DynamicMap:
    """Codes of numbers relative to the largest of their block, with more codes for larger numbers.

    The numbers between two powers of ten have cells of equal width: twice as many as those below, over seven decades.
    A code stands for the centre of its cell, and the last one for 1. These are the cells of the dynamic map of Dettmers
    et al. 2022, with two differences:

    - Signed codes are symmetric, with both -1 and 1, so the largest number of a block is exact.
    - No unsigned code is 0. A second moment that is rounded to 0 beside a first moment would give a huge update.
    """

    signed: bool  # whether codes are int8 of numbers in [-1, 1], or else uint8 of numbers in [0, 1]

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8 if self.signed else torch.uint8

    @property
    def _edges(self) -> list[float]:
        cells = [2**decade if self.signed else 2 ** (decade + 1) for decade in range(_DECADES)]
        cells[-1] -= self.signed  # for the code of -1
        lows = [10.0 ** (decade - _DECADES) for decade in range(_DECADES)]
        return [
            low * (1 + 9 * place / number) for low, number in zip(lows, cells, strict=True) for place in range(number)
        ] + [1.0]

    def values(self, device: torch.device) -> Tensor:
        """Return the numbers of all codes, fp32 `[256]`, by the code as an unsigned byte."""
        edges = self._edges
        found = [0.0 if self.signed else edges[0] / 2, *((low + high) / 2 for low, high in pairwise(edges)), 1.0]
        if self.signed:
            found += [-1.0, *(-value for value in reversed(found[1:]))]  # -128 is not used
        return torch.tensor(found, device=device)

    def codes(self, device: torch.device) -> Tensor:
        """Return the codes of all numbers, by the upper 18 bits of their fp32, which `code_index` returns."""
        # Each number has these upper bits, and lies in the middle of all numbers that share them.
        numbers = (torch.arange(1 << INDEX_BITS) * 2 + 1 << LOW_BITS - 1).int().view(torch.float32)  # with these bits
        # The code is the number of edges up to the number; the copied sign selects the symmetric code.
        codes = torch.bucketize(numbers.abs(), torch.tensor(self._edges), right=True).float()
        return (codes.copysign_(numbers) if self.signed else codes).to(self.dtype).to(device)


def code_index(numbers: Tensor) -> Tensor:
    """Return the places of fp32 numbers in the table of their codes, int32 of the same shape."""
    return numbers.view(torch.int32).bitwise_right_shift(LOW_BITS).bitwise_and_((1 << INDEX_BITS) - 1)


MAPS = {FIRST: DynamicMap(signed=True), SECOND: DynamicMap(signed=False)}
"""The map of each moment, by the key of its codes."""
