"""AdamW with moments in 8 bits (Dettmers et al. 2022, arXiv:2110.02861), the same under every layout.

A moment is a code of 8 bits for each element, and a scale for each block of 256 elements: the largest moment of the
block. Blocks are those of the flattened whole parameter, so a scale is a maximum over all ranks with elements of the
block. Ranks that shared the scales of their own parts would cut other blocks in each layout, and learn something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.engine.optimizers.adamw import PartlyAdamW, adamw_options
from trainer.engine.optimizers.parameters import Groups, TrainedParameters, divided
from trainer.engine.optimizers.skipping import unchanged_if
from trainer.engine.optimizers.tensor_batches import stepped
from trainer.engine.optimizers.whole_access import WholeAccess
from trainer.features.adamw_8bit import fused
from trainer.features.adamw_8bit import section as schema
from trainer.features.adamw_8bit.dynamic_map import FIRST, MAPS, SECOND, code_index
from trainer.features.adamw_8bit.scale_blocks import BlockRows, Rows, block_rows, is_shared, num_blocks, share_maxima
from trainer.parallel import kernel_support
from trainer.parallel.placement import ParameterPlacement
from trainer.parallel.shards.gathering import local_part

SMALLEST = 4096
"""The elements of a whole parameter from which on its moments have 8 bits; smaller ones cost little memory."""
STEP, SCALES = "step", "scales"
"""The keys of the state of a large parameter beside those of the codes."""
IN_BLOCKS = "in_blocks"
"""The key of a parameter group: whether its moments have 8 bits."""

_PIECE = 2**20  # elements that are updated at once, in fp32
_TINY, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def _is_in_blocks(shape: tuple[int, ...]) -> bool:
    """Return whether the moments of a parameter of this whole shape have 8 bits."""
    return prod(shape) >= SMALLEST


class Tables(NamedTuple):
    """The `values` and `codes` of the maps of both moments."""

    values: list[Tensor]
    codes: list[Tensor]


class AdamW8bit(PartlyAdamW):
    """AdamW with moments in 8 bits for large parameters, and in fp32 for small ones.

    A step computes the moments in fp32, updates the weights from them, and stores them as codes. Ranks first exchange
    the maxima of the blocks of sharded parameters, 8 bytes for a block, in one collective for each axis.

    Args:
        groups: parameter groups; those with `in_blocks` hold large parameters.
    """

    key = IN_BLOCKS
    whole_keys = frozenset((SCALES,))
    state_dtypes = MappingProxyType({key: codes.dtype for key, codes in MAPS.items()})

    def __init__(self, groups: Groups, whole: WholeAccess, **options: Any) -> None:
        super().__init__(groups, **options)
        self._whole = whole
        self._tables: dict[torch.device, Tables] = {}
        self._rows: dict[nn.Parameter, BlockRows] = {}

    @classmethod
    def build(cls, section: schema.AdamW8bit, trained: TrainedParameters) -> AdamW8bit:
        groups = divided(
            trained.groups(section),
            IN_BLOCKS,
            lambda parameter: _is_in_blocks(trained.whole.placement(parameter).shape),
        )
        return cls(groups, trained.whole, **adamw_options(section, trained))

    @classmethod
    def notes(cls, device: torch.device) -> list[str]:
        if device.type != "cuda":
            return []
        obstacle = kernel_support.obstacle(device)
        if obstacle is None:
            return ["moments in 8 bits are updated in a fused kernel"]
        return [f"moments in 8 bits are updated by operations of torch, because {obstacle}"]

    def state_shapes(self, parameter: nn.Parameter, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        if _is_in_blocks(shape):
            return {STEP: (), **dict.fromkeys(MAPS, shape), SCALES: (2, num_blocks(shape))}
        return super().state_shapes(parameter, shape)

    def update(self, groups: Groups) -> None:
        mesh = self._whole.mesh
        shared: list[_Part] = []
        for part in (part for group in groups for part in self._parts(group)):
            # A whole parameter needs no maxima of other ranks. The others wait below, for one exchange of all.
            if is_shared(part.placement, mesh):
                shared.append(part)
            else:
                part.update()
        if mesh is not None:
            maxima = share_maxima(
                [part.maxima().view(-1) for part in shared], [part.placement for part in shared], mesh
            )
            for part, found in zip(shared, maxima, strict=True):
                part.update(found.view(2, -1))

    def _parts(self, group: Mapping[str, Any]) -> Iterator[_Part]:
        """Count a step of the parameters of a group with a gradient, and yield their parts."""
        parameters = stepped(group["params"])
        if not parameters:
            return
        states, flag = [self._state(parameter) for parameter in parameters], self.found_inf
        steps = [state[STEP] for state in states]
        torch._foreach_add_(steps, 1)
        if flag is not None:
            # A bad step (flag 1) does not count, and the host need not read the flag.
            torch._foreach_sub_(steps, [flag] * len(steps))
        first, second = (1 - beta ** torch.stack(steps).double() for beta in group["betas"])
        # In fp64: `1 - beta ** step` is near 0 in the first steps, and fp32 would lose digits.
        corrections = torch.stack((group["lr"] / first, 1 / second), 1).float()
        is_fused = kernel_support.obstacle(corrections.device) is None
        for parameter, state, own in zip(parameters, states, corrections, strict=True):
            assert parameter.grad is not None
            weight, gradient = local_part(parameter.detach()), local_part(parameter.grad).contiguous()
            placement, device = self._whole.placement(parameter), weight.device
            if parameter not in self._rows:
                self._rows[parameter] = block_rows(placement, weight.shape, self._whole.mesh, device)
            if device not in self._tables:
                kinds = MAPS.values()
                self._tables[device] = Tables([m.values(device) for m in kinds], [m.codes(device) for m in kinds])
            rows, tables = self._rows[parameter], self._tables[device]
            yield _Part(placement, weight, gradient, state, group, own, rows, tables, flag, is_fused)

    def _state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return this rank's part of the state of a parameter, which is made in its first step."""
        own, state = local_part(parameter.detach()), self.state[parameter]
        if not state:
            state[STEP] = torch.zeros((), device=own.device)
            for key, codes in MAPS.items():
                state[key] = torch.zeros(own.shape, dtype=codes.dtype, device=own.device)
            state[SCALES] = torch.zeros(2, num_blocks(self._whole.placement(parameter).shape), device=own.device)
        return {key: local_part(value) for key, value in state.items()}  # a loaded state of FSDP has DTensors


@dataclass(frozen=True)
class _Part:
    """This rank's part of a large parameter in one step.

    All operations on its elements are elementwise, but for the maxima of the blocks. Each rounds by itself: moments
    from a fused product and sum would have other codes. The kernels compute the same numbers as torch's operations.
    Only torch's square root on a CPU, which the codes do not need, may be the next number.
    """

    placement: ParameterPlacement
    weight: Tensor  # the part, which changes
    gradient: Tensor  # its gradient, contiguous
    state: dict[str, Tensor]
    group: Mapping[str, Any]
    # the learning rate and the factor of second moments, both corrected for the zeros from which the moments began,
    # fp32 `[2]`
    corrections: Tensor
    rows: BlockRows
    tables: Tables
    flag: Tensor | None  # the flag of a bad step, in which nothing changes; None: the step is good
    is_fused: bool

    def maxima(self) -> Tensor:
        """Return the largest new moments of this part in each block, fp32 `[2, blocks]`."""
        maxima = torch.zeros_like(self.state[SCALES])
        if self.is_fused:
            fused.raise_maxima(maxima, *self._read())
        else:
            for rows in self.rows.pieces(_PIECE):
                self._raise(maxima, rows, *self._moments(rows))
        return maxima

    def update(self, maxima: Tensor | None = None) -> None:
        """Step the weights and store the new moments.

        Args:
            maxima: the largest new moments of whole blocks; None: the part is the whole parameter.
        """
        scales, weight = self.state[SCALES], self.weight.contiguous()
        if self.is_fused:
            decay = 1 - self.group["lr"] * self.group["weight_decay"]
            fused.update(
                weight, *self._read(), self.tables.codes, maxima, self.corrections, self.flag, self.group["eps"], decay
            )
        else:
            for rows in self.rows.pieces(_PIECE):
                changed = [rows.of(tensor) for tensor in (weight, *(self.state[key] for key in MAPS))]
                # Shared scales are written once, after all rows.
                own_scales = [] if maxima is not None else [scales[:, rows.blocks]]
                with unchanged_if(self.flag, *changed, *own_scales):
                    self._update(rows, *changed, maxima=maxima)
        if maxima is not None:
            with unchanged_if(self.flag, scales):
                scales.copy_(maxima)
        # A part with other strides was updated as a contiguous copy.
        if weight is not self.weight:
            self.weight.copy_(weight)

    def _read(self) -> tuple[Any, ...]:
        """Return the arguments from which the operations of `fused` compute the new moments."""
        stored = [self.state[key] for key in (FIRST, SECOND, SCALES)]
        return self.gradient, *stored, self.tables.values, self.rows.blocks, self.rows.width, self.group["betas"]

    def _update(self, rows: Rows, weight: Tensor, *codes: Tensor, maxima: Tensor | None) -> None:
        """Step the weights of some rows, `[rows, width]`, and store their new moments as codes of the same shape."""
        first, second = self._moments(rows)
        if maxima is None:  # these rows are whole blocks
            maxima = self.state[SCALES]
            self._raise(maxima, rows, first, second)
        for moment, scale, stored, table in zip((first, second), maxima, codes, self.tables.codes, strict=True):
            # Relative to the largest moment of the block; a block of zeros is divided by the smallest normal number.
            index = code_index(moment / rows.spread(scale).clamp(min=_TINY))
            torch.index_select(table, 0, index.view(-1), out=stored.view(-1))
        rate, factor = self.corrections
        update = first.div_(second.mul_(factor).sqrt_().add_(self.group["eps"]))
        weight.mul_(1 - self.group["lr"] * self.group["weight_decay"])
        weight.sub_(update.mul_(rate))

    def _moments(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return the new moments of some rows, fp32 `[rows, width]`."""
        gradient, (beta_1, beta_2) = rows.of(self.gradient).float(), self.group["betas"]
        first, second = self._stored(rows, FIRST, beta_1), self._stored(rows, SECOND, beta_2)
        first.add_(gradient * (1 - beta_1))  # `lerp_` and `addcmul_` fuse product and sum on some devices
        second.add_(gradient.square().mul_(1 - beta_2))
        return first, second.clamp_(max=_LARGEST)  # infinite moments would leave no number in their block

    def _stored(self, rows: Rows, key: str, factor: float) -> Tensor:
        place = list(MAPS).index(key)
        codes = rows.of(self.state[key])
        numbers = self.tables.values[place].index_select(0, codes.view(torch.uint8).int().view(-1)).view(codes.shape)
        return numbers.mul_(rows.spread(self.state[SCALES][place] * factor))

    def _raise(self, maxima: Tensor, rows: Rows, first: Tensor, second: Tensor) -> None:
        rows.raise_(maxima[0], torch.linalg.vector_norm(first, torch.inf, dim=1))
        rows.raise_(maxima[1], second.amax(1))
