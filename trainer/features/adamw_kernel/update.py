"""The update of `adamw` by one kernel, over all parameters of a rank."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from trainer.engine.optimizers.base import EngineOptimizer, OptimizerUpdate
from trainer.engine.optimizers.parameters import TrainedParameters
from trainer.features.adamw_kernel import operations
from trainer.parallel.copying import to_device
from trainer.parallel.shards.gathering import local_part
from trainer.parallel.weight_copies import KeptCopy, keep_copy
from trainer.recipe.strategies import STRATEGIES

_ROUNDED = {"fp16": torch.float16}
_ANY_ADDRESS = 1  # of a gradient without elements, which has none


def obstacle(optimizer: EngineOptimizer, trained: TrainedParameters) -> str | None:
    """Return the reason why the kernel does not step an optimizer; None: it does."""
    recipe = trained.recipe
    if recipe is not None and STRATEGIES[recipe.parallel.strategy].package:
        return "DeepSpeed steps flattened weights"
    for kind in type(optimizer).__mro__:
        if issubclass(kind, OptimizerUpdate) and kind.reads_gradients and "step" in vars(kind):
            return f"the update {kind.__name__} reads the clipped gradients"
    for name, parameter in trained.trainable.items():
        weight = local_part(parameter)
        if weight.dtype != torch.float32:
            return f"{name} is stored in {str(weight.dtype).removeprefix('torch.')}, not in fp32"
        if not weight.is_contiguous():
            return f"{name} is not contiguous"
    return None


class _Member(NamedTuple):
    """A parameter with its state and its copy; tensors are this rank's parts."""

    parameter: nn.Parameter
    weight: Tensor
    first: Tensor
    second: Tensor
    copy: KeptCopy
    state: dict[str, Tensor]
    group: int  # its index


class _Tables(NamedTuple):
    """The tensors that the kernels read in each step; see `operations.update`."""

    steps: Tensor
    corrections: Tensor
    groups: Tensor
    settings: Tensor
    table: Tensor
    owners: Tensor
    nothing: Tensor  # in place of a copy


class AdamWUpdate:
    """Steps the parameters of an optimizer with the state of torch's AdamW.

    The tables of addresses are made once. In each step, the host sends its numbers in one copy: the addresses of the
    gradients and of the rounded weights, and the learning rates.

    Args:
        optimizer: an optimizer of torch's AdamW, in fp32.
        trained: its parameters.
    """

    def __init__(self, optimizer: EngineOptimizer, trained: TrainedParameters) -> None:
        self._optimizer = optimizer
        self._copies = {parameter: keep_copy(parameter) for parameter in trained.trainable.values()}
        precision = trained.recipe.precision if trained.recipe else "fp32"
        self._rounded = _ROUNDED.get(precision, torch.bfloat16)
        self._members: list[_Member] = []
        self._known: list[int] = []
        self._tables: _Tables | None = None

    @property
    def tables(self) -> Sequence[Tensor]:
        """The tensors that the kernels read in each step; none before the first one."""
        return self._tables or ()

    @torch.no_grad()
    def step(self, found_inf: Tensor | None, factor: Tensor | None) -> None:
        """Step the parameters that have a gradient.

        Args:
            found_inf: a scalar on the device; if it is not 0, nothing changes.
            factor: a scalar on the device that multiplies the gradients; None: 1.
        """
        if self._make_states() or self._tables is None or self._facts() != self._known:
            self._make_tables()
        if (tables := self._tables) is None:
            return
        gradients = [_gradient_of(member.parameter, self._rounded) for member in self._members]
        # A copy that is out of date stays so, because a bad step writes nothing.
        copies = [
            tables.nothing if (tensor := copy.tensor) is None or copy.version != parameter._version else tensor
            for parameter, _, _, _, copy, *_ in self._members
        ]
        words, options = self._words(gradients, copies), self._optimizer.defaults
        operations.find_corrections(tables.corrections, tables.steps, words, tables.groups, tables.settings, found_inf)
        stepped = [number for number, gradient in enumerate(gradients) if gradient is not None]
        members = [self._members[number] for number in stepped]
        weights = [member.weight for member in members]
        operations.update(
            words, tables.corrections, tables.table, tables.owners, weights,
            [gradient for gradient in gradients if gradient is not None], [member.first for member in members],
            [member.second for member in members], [copies[number] for number in stepped], found_inf,
            None if factor is None else factor.to(tables.corrections), list(options["betas"]), options["eps"],
            self._rounded,
        )  # fmt: skip
        increment_version(weights)  # the kernel writes memory that torch does not see
        for number, member in zip(stepped, members, strict=True):
            if copies[number] is not tables.nothing:
                member.copy.version = member.parameter._version

    def _make_states(self) -> bool:
        """Make the state of parameters with a first gradient; return whether any state is new, or loaded."""
        state, found = self._optimizer.state, False
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in state:
                    found, moments = True, [torch.zeros_like(parameter) for _ in range(2)]
                    step = torch.zeros((), device=local_part(parameter).device)
                    state[parameter] = {"step": step, "exp_avg": moments[0], "exp_avg_sq": moments[1]}
        return found or any(state[member.parameter] is not member.state for member in self._members)

    def _facts(self) -> list[int]:
        """Return facts that change if a parameter or a copy has other memory."""
        copies = [id(member.copy.tensor) for member in self._members]
        return copies + ([] if self._is_planned else [local_part(m.parameter).data_ptr() for m in self._members])

    def _make_tables(self) -> None:
        state, groups = self._optimizer.state, self._optimizer.param_groups
        self._members = [
            _Member(parameter, *_parts(parameter, own), self._copies[parameter], own, index)
            for index, group in enumerate(groups)
            for parameter in group["params"]
            if (own := state.get(parameter))
        ]
        if not self._members:
            return
        self._known = self._facts()
        device = self._members[0].weight.device
        settings = [*self._optimizer.defaults["betas"], *(group["weight_decay"] for group in groups)]
        # One tensor, so that one kernel counts all steps; the states have views of it.
        steps = torch.stack([member.state["step"].to(device) for member in self._members])
        for member, step in zip(self._members, steps.unbind(), strict=True):
            member.state["step"] = step
        sizes = [member.weight.numel() for member in self._members]
        programs = [-(-size // operations.TILE) for size in sizes]
        owners = [torch.full((number,), index, dtype=torch.int32) for index, number in enumerate(programs)]
        before = [0, *accumulate(programs)]
        rows = zip(*(_rows_of(member.copy.tensor) for member in self._members), strict=True)
        table = [*self._addresses("weight", "first", "second"), sizes, *rows, before[:-1]]
        self._tables = _Tables(
            steps,
            torch.empty(3, len(sizes), device=device),
            to_device(torch.tensor([member.group for member in self._members], dtype=torch.int32), device),
            to_device(torch.tensor(settings, dtype=torch.float64), device),
            to_device(torch.tensor(table), device),
            to_device(torch.cat(owners), device),
            torch.empty(0, dtype=self._rounded, device=device),
        )

    def _addresses(self, *names: str) -> list[list[int]]:
        if self._is_planned:
            return [[0] * len(self._members) for _ in names]
        return [[getattr(member, name).data_ptr() for member in self._members] for name in names]

    @property
    def _is_planned(self) -> bool:
        """Whether the tensors have no memory, so that operations read no address."""
        return type(self._members[0].weight) is not Tensor

    def _words(self, gradients: Sequence[Tensor | None], copies: Sequence[Tensor]) -> Tensor:
        """Return the numbers of a step on the device; see `operations.update`."""
        groups, device = self._optimizer.param_groups, copies[0].device
        if self._is_planned:
            return torch.empty(3 * len(copies) + len(groups), dtype=torch.int64, device=device)
        words = [0 if gradient is None else gradient.data_ptr() or _ANY_ADDRESS for gradient in gradients]
        words += [copy.data_ptr() for copy in copies]
        words += [gradient is not None and gradient.dtype == self._rounded for gradient in gradients]
        # The bits of fp64 as integers.
        words += struct.unpack(f"{len(groups)}q", struct.pack(f"{len(groups)}d", *(group["lr"] for group in groups)))
        return to_device(torch.tensor(words), device)


def _parts(parameter: nn.Parameter, state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's parts of a weight and of its moments."""
    return local_part(parameter.detach()), local_part(state["exp_avg"]), local_part(state["exp_avg_sq"])


def _gradient_of(parameter: nn.Parameter, rounded: torch.dtype) -> Tensor | None:
    """Return the part of a gradient as the kernel reads it: contiguous, in fp32 or in the type of the copies."""
    if parameter.grad is None:
        return None
    gradient = local_part(parameter.grad)
    return (gradient if gradient.dtype in (torch.float32, rounded) else gradient.float()).contiguous()


def _rows_of(copy: Tensor | None) -> tuple[int, int]:
    """Return the number of elements of a row of a copy and the distance of rows; zeros for a contiguous copy."""
    if copy is None or copy.is_contiguous():
        return 0, 0
    rows = copy.view(-1, copy.shape[-1])
    assert rows.stride(1) == 1, "the elements of a row are neighbours"
    return rows.shape[1], rows.stride(0)


def updates(optimizer: EngineOptimizer, trained: TrainedParameters) -> AdamWUpdate | str:
    """Return the update of an optimizer by the kernel, or the reason why torch steps it."""
    return obstacle(optimizer, trained) or AdamWUpdate(optimizer, trained)
