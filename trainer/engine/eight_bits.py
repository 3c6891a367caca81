"""AdamW with moments in 8 bits (Dettmers et al. 2022, arXiv:2110.02861), the same under every layout.

A moment is a code of 8 bits for each element, and a scale for each block of 256 elements: the largest moment of the
block. Blocks are those of the flattened whole parameter, so a scale is a maximum over all ranks with elements of the
block. Ranks that shared the scales of their own parts would cut other blocks in each layout, and learn something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from trainer.engine.skipping import flag_of, unchanged_if
from trainer.engine.whole_matrices import PartlyAdamW, WholeAccess
from trainer.parallel.blocks import BlockRows, block_rows, num_blocks, share_maxima
from trainer.parallel.placement import ParameterPlacement
from trainer.parallel.whole import local_part

SMALLEST = 4096
"""The elements of a whole parameter from which on its moments have 8 bits; smaller ones cost little memory."""
STEP, FIRST, SECOND, SCALES = "step", "exp_avg_codes", "exp_avg_sq_codes", "scales"
"""The keys of the state of a large parameter."""
IN_BLOCKS = "in_blocks"
"""The key of a parameter group: whether its moments have 8 bits."""

_INDEX_BITS, _LOW_BITS = 18, 14  # of fp32: sign, exponent and 9 bits of the fraction; the rest
_DECADES = 7  # powers of ten that a code distinguishes; the largest has half of all codes
_PIECE = 2**20  # elements that are updated at once, in fp32
_TINY, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def is_in_blocks(shape: tuple[int, ...]) -> bool:
    """Return whether the moments of a parameter of this whole shape have 8 bits."""
    return prod(shape) >= SMALLEST


def moment_bytes(shape: tuple[int, ...], num_elements: int) -> int:
    """Return the bytes of the moments of a parameter on a rank.

    Args:
        shape: the shape of the whole parameter.
        num_elements: the elements of the rank's part. The scales of all blocks are on every rank.
    """
    return 2 * num_elements + 8 * num_blocks(shape) if is_in_blocks(shape) else 8 * num_elements


@dataclass(frozen=True)
class DynamicMap:
    """Codes of numbers relative to the largest of their block, with more codes for larger numbers.

    The numbers between two powers of ten have cells of equal width: twice as many as those below, over seven decades.
    A code stands for the centre of its cell, and the last one for 1. These are the cells of the dynamic map of Dettmers
    et al. 2022, with two differences:

    - Signed codes are symmetric, with both -1 and 1, so the largest number of a block is exact.
    - No unsigned code is 0. A second moment that is rounded to 0 beside a first moment would give a huge update.

    Args:
        signed: whether codes are int8 of numbers in [-1, 1], or else uint8 of numbers in [0, 1].
    """

    signed: bool

    @property
    def dtype(self) -> torch.dtype:
        """The type of the codes."""
        return torch.int8 if self.signed else torch.uint8

    @property
    def _edges(self) -> list[float]:
        """The lower edges of the cells of the codes from 1 on."""
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
        numbers = (torch.arange(1 << _INDEX_BITS) * 2 + 1 << _LOW_BITS - 1).int().view(torch.float32)  # with these bits
        codes = torch.bucketize(numbers.abs(), torch.tensor(self._edges), right=True).float()
        return (codes.copysign_(numbers) if self.signed else codes).to(self.dtype).to(device)


def code_index(numbers: Tensor) -> Tensor:
    """Return the places of fp32 numbers in the table of their codes, int32 of the same shape."""
    return numbers.view(torch.int32).bitwise_right_shift(_LOW_BITS).bitwise_and_((1 << _INDEX_BITS) - 1)


MAPS = {FIRST: DynamicMap(signed=True), SECOND: DynamicMap(signed=False)}


Tables = Mapping[str, tuple[Tensor, Tensor]]
"""The `values` and `codes` of both maps."""


class AdamW8bit(PartlyAdamW):
    """AdamW with moments in 8 bits for large parameters, and in fp32 for small ones.

    A step computes the moments in fp32, updates the weights from them, and stores them as codes. Ranks first exchange
    the maxima of the blocks of sharded parameters, 8 bytes for a block, in one collective for each axis.

    Args:
        groups: parameter groups; those with `in_blocks` hold large parameters.
        whole: the placement of the parameters.
        options: the options of AdamW.
    """

    key = IN_BLOCKS
    whole_keys = frozenset((SCALES,))
    state_dtypes = MappingProxyType({key: codes.dtype for key, codes in MAPS.items()})

    def __init__(self, groups: list[dict[str, Any]], whole: WholeAccess, **options: Any) -> None:
        super().__init__(groups, **options)
        self._whole = whole
        self._tables: dict[torch.device, Tables] = {}

    def update(self, groups: list[dict[str, Any]]) -> None:
        mesh = self._whole.mesh
        shared: list[_Part] = []
        for group in groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    part = self._part(parameter, group)
                    if mesh is not None and any(mesh.size(axis) > 1 for axis in part.placement.split_axes):
                        shared.append(part)
                    else:
                        part.update()
        if mesh is not None:
            maxima = share_maxima(
                [part.maxima().view(-1) for part in shared], [part.placement for part in shared], mesh
            )
            for part, found in zip(shared, maxima, strict=True):
                part.update(found.view(2, -1))

    def _part(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> _Part:
        own, state = local_part(parameter.detach()), self.state[parameter]
        placement = self._whole.placement(parameter)
        if not state:
            state[STEP] = torch.zeros((), device=own.device)
            state[FIRST] = torch.zeros(own.shape, dtype=MAPS[FIRST].dtype, device=own.device)
            state[SECOND] = torch.zeros(own.shape, dtype=MAPS[SECOND].dtype, device=own.device)
            state[SCALES] = torch.zeros(2, num_blocks(placement.shape), device=own.device)
        assert parameter.grad is not None
        rows = block_rows(placement, own.shape, self._whole.mesh, own.device)
        if own.device not in self._tables:
            self._tables[own.device] = {
                key: (found.values(own.device), found.codes(own.device)) for key, found in MAPS.items()
            }
        tables = self._tables[own.device]
        held = {key: local_part(value) for key, value in state.items()}  # a loaded state of FSDP has DTensors
        return _Part(placement, own, local_part(parameter.grad), held, group, rows, tables, flag_of(self))


@dataclass(frozen=True)
class _Part:
    """This rank's part of a large parameter in one step.

    All operations on its elements are elementwise, but for the maxima of the blocks.

    Args:
        placement: the placement of the parameter.
        weight: the part, which changes.
        gradient: its gradient.
        state: the state of the optimizer for it, which changes.
        group: the options of AdamW.
        rows: the blocks of its elements.
        tables: the numbers of the codes and the codes of numbers, for each moment.
        flag: the flag of a bad step, in which nothing changes; None: the step is good.
    """

    placement: ParameterPlacement
    weight: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    group: Mapping[str, Any]
    rows: BlockRows
    tables: Tables
    flag: Tensor | None

    def maxima(self) -> Tensor:
        """Return the largest new moments of this part in each block, fp32 `[2, blocks]`."""
        maxima = torch.zeros_like(self.state[SCALES])
        for piece in self._pieces():
            self._raise(maxima, piece, *self._moments(piece))
        return maxima

    def update(self, maxima: Tensor | None = None) -> None:
        """Step the weights and store the new moments.

        Args:
            maxima: the largest new moments of whole blocks; None: the part is the whole parameter.
        """
        scales = torch.zeros_like(self.state[SCALES]) if maxima is None else maxima
        weight = self.weight.contiguous()
        with unchanged_if(self.flag, self.state[STEP], self.state[SCALES]):
            self.state[STEP] += 1
            for piece in self._pieces():
                changed = [self.rows.of(tensor)[piece] for tensor in (weight, *(self.state[key] for key in MAPS))]
                with unchanged_if(self.flag, *changed):
                    self._update(piece, scales, *changed, is_whole=maxima is None)
            self.state[SCALES].copy_(scales)
        if weight is not self.weight:
            self.weight.copy_(weight)

    def _update(self, piece: slice, scales: Tensor, weight: Tensor, *codes: Tensor, is_whole: bool) -> None:
        """Step the weights of some rows, `[rows, width]`, and store their new moments as codes of the same shape."""
        first_share, second_share = (1 - beta ** self.state[STEP].double() for beta in self.group["betas"])
        first, second = self._moments(piece)
        if is_whole:  # a piece has whole blocks
            self._raise(scales, piece, first, second)
        for key, moment, scale, stored in zip(MAPS, (first, second), scales, codes, strict=True):
            index = code_index(moment / self.rows.spread(scale, piece).clamp_(min=_TINY))
            stored.copy_(self.tables[key][1].index_select(0, index.view(-1)).view(index.shape))
        update = first.div_(second.div_(second_share).sqrt_().add_(self.group["eps"]))
        weight.mul_(1 - self.group["lr"] * self.group["weight_decay"])
        weight.sub_(update.mul_(self.group["lr"] / first_share))

    def _pieces(self) -> Iterator[slice]:
        """Yield rows that are updated at once: a multiple of a block, so that memory for fp32 is bounded."""
        number = _PIECE // self.rows.width
        for start in range(0, len(self.rows.blocks), number):
            yield slice(start, start + number)

    def _moments(self, piece: slice) -> tuple[Tensor, Tensor]:
        """Return the new moments of some rows, fp32 `[rows, width]`."""
        first, second = (self._stored(key, scale, piece) for key, scale in zip(MAPS, self.state[SCALES], strict=True))
        gradient = self.gradient.reshape(-1, self.rows.width)[piece].float()
        first.lerp_(gradient, 1 - self.group["betas"][0])
        second.mul_(self.group["betas"][1]).addcmul_(gradient, gradient, value=1 - self.group["betas"][1])
        return first, second.clamp_(max=_LARGEST)  # infinite moments would leave no number in their block

    def _stored(self, key: str, scale: Tensor, piece: slice) -> Tensor:
        codes = self.rows.of(self.state[key])[piece]
        numbers = self.tables[key][0].index_select(0, codes.view(torch.uint8).int().view(-1)).view(codes.shape)
        return numbers.mul_(self.rows.spread(scale, piece))

    def _raise(self, maxima: Tensor, piece: slice, first: Tensor, second: Tensor) -> None:
        self.rows.raise_(maxima[0], first.abs(), piece)
        self.rows.raise_(maxima[1], second, piece)
