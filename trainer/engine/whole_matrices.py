"""Muon and Adafactor under every layout: their update of a matrix depends on all of its elements.

Each matrix is gathered by itself. All ranks compute its whole update and keep their parts, so a layout changes rounding
only. The iterations of Muon are torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, EPS, _adjust_lr, _zeropower_via_newtonschulz
from transformers.pytorch_utils import Conv1D

from trainer.engine.skipping import flag_of, unchanged_if
from trainer.models.families.table import layers_of
from trainer.parallel.linear import ColumnParallelLinear, RowParallelLinear
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.placement import ParameterPlacement
from trainer.parallel.whole import gather_on_all, local_part, part_like

_LINEAR = (nn.Linear, Conv1D, ColumnParallelLinear, RowParallelLinear)
_COEFFICIENTS = (DEFAULT_A, DEFAULT_B, DEFAULT_C)
_Groups = list[dict[str, Any]]


def matrix_names(model: nn.Module) -> set[str]:
    """Return the names of the matrices that Muon updates: weights of linear layers in the repeated layers.

    Raises:
        UsageError: the layers of the model are unknown, because its family is not in the table.
    """
    inside = {
        module.weight
        for layer in layers_of(model).values()
        for module in layer.modules()
        if isinstance(module, _LINEAR)
    }
    return {name for name, parameter in model.named_parameters() if parameter in inside}


@dataclass(frozen=True)
class WholeAccess:
    """Whole tensors of sharded parameters; without a mesh, every tensor is whole.

    Args:
        placements: the placement of each parameter.
        mesh: the ranks.
    """

    placements: Mapping[nn.Parameter, ParameterPlacement]
    mesh: ParallelMesh | None = None

    def placement(self, parameter: nn.Parameter) -> ParameterPlacement:
        """Return the placement of a parameter."""
        if self.mesh is None:
            return ParameterPlacement("", tuple(parameter.shape))
        return self.placements[parameter]

    def gather(self, parameter: nn.Parameter, part: Tensor) -> Tensor:
        """Return the whole tensor on every rank for this rank's part; a collective if the parameter is sharded.

        Args:
            parameter: the parameter.
            part: a plain tensor with the shape of this rank's part of it.
        """
        if self.mesh is None:
            return part
        return gather_on_all(part, parameter, self.placements[parameter], self.mesh)

    def part(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor."""
        if self.mesh is None:
            return whole
        return part_like(whole, parameter, self.placements[parameter], self.mesh)


class PartlyAdamW(torch.optim.AdamW):
    """AdamW for some parameter groups; a subclass updates those that have its `key`.

    Attributes:
        whole_keys: the keys of state that is whole on every rank, whatever the placement of its parameter.
        state_dtypes: the types of state that is not at least fp32, by key.
    """

    key: str
    whole_keys: frozenset[str] = frozenset()
    state_dtypes: Mapping[str, torch.dtype] = MappingProxyType({})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        every = self.param_groups
        self.param_groups = [group for group in every if self.key not in group]
        try:
            loss = super().step(closure) if self.param_groups else None
        finally:
            self.param_groups = every
        self.update([group for group in every if self.key in group])
        return loss

    def update(self, groups: _Groups) -> None:
        """Update the parameters of groups with `key`."""
        raise NotImplementedError


class Muon(PartlyAdamW):
    """Momentum orthogonalised by Newton-Schulz iterations, for matrices (Jordan et al. 2024); AdamW for the rest.

    Updates have the root mean square of AdamW's (Liu et al. 2025, arXiv:2502.16982), so both share the learning rate
    and the weight decay. Momentum is sharded as the weights. Ranks gather updates in bf16, the type of the iterations.

    Args:
        groups: parameter groups; those with `momentum` hold matrices.
        whole: the placement of the parameters.
        options: the options of AdamW.
    """

    key = "momentum"

    def __init__(self, groups: _Groups, whole: WholeAccess, **options: Any) -> None:
        super().__init__(groups, **options)
        self._whole = whole

    def update(self, groups: _Groups) -> None:
        for group in groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        own, gradient, momentum = map(local_part, (parameter, parameter.grad, state["momentum_buffer"]))
        with unchanged_if(flag_of(self), own, momentum):
            momentum.lerp_(gradient, 1 - group["momentum"])
            update = gradient.lerp(momentum, group["momentum"])  # Nesterov's
            whole = self._whole.gather(parameter, update.bfloat16())
            orthogonal = _zeropower_via_newtonschulz(whole, _COEFFICIENTS, group["iterations"], EPS)
            rate = _adjust_lr(group["lr"], "match_rms_adamw", whole.shape)
            own.mul_(1 - group["lr"] * group["weight_decay"])
            own.add_(self._whole.part(parameter, orthogonal), alpha=-rate)


class Adafactor(torch.optim.Optimizer):
    """Adafactor (Shazeer & Stern 2018, arXiv:1804.04235): second moments of a matrix as a row and a column.

    Row and column are whole on every rank, which costs little memory. The update is that of torch's class, which waits
    for the device twice for each parameter; here, its numbers stay on the device.

    Args:
        groups: parameter groups.
        whole: the placement of the parameters.
        options: the options of torch's Adafactor.
    """

    whole_keys = frozenset(("step", "row_var", "col_var", "variance"))

    def __init__(self, groups: _Groups, whole: WholeAccess, **options: Any) -> None:
        super().__init__(groups, options)
        self._whole = whole

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        assert parameter.grad is not None
        own = local_part(parameter.detach())
        weight, gradient = (self._whole.gather(parameter, part) for part in (own, local_part(parameter.grad)))
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=own.device)
            if gradient.dim() > 1:
                state["row_var"] = gradient.new_zeros((*gradient.shape[:-1], 1))
                state["col_var"] = gradient.new_zeros((*gradient.shape[:-2], 1, gradient.shape[-1]))
            else:
                state["variance"] = torch.zeros_like(gradient)
        with unchanged_if(flag_of(self), own, *state.values()):
            _factored_update_(weight, gradient, state, group)
            if weight is not own:
                own.copy_(self._whole.part(parameter, weight))


def _factored_update_(weight: Tensor, gradient: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any]) -> None:
    """Update a whole tensor and its state by Adafactor; relative to its size, and clipped by its own norm."""
    smallest, length = torch.finfo(weight.dtype).eps, weight.numel() ** 0.5
    state["step"] += 1
    steps = state["step"].double()
    fresh = steps.pow(group["beta2_decay"]).to(weight.dtype)  # the share of the new second moment
    rate = steps.rsqrt().clamp(max=group["lr"]) * (weight.norm(2).double() / length).clamp(min=group["eps2"])
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    if gradient.dim() > 1:
        row, column = state["row_var"], state["col_var"]
        for moment, dim in ((row, -1), (column, -2)):
            moment.lerp_(gradient.norm(dim=dim, keepdim=True).square_().div_(gradient.size(dim)), fresh)
        estimate = (row @ column).div_(row.mean(dim=-2, keepdim=True).clamp_(min=smallest))
    else:
        estimate = state["variance"].lerp_(gradient.square(), fresh).clone()
    update = estimate.clamp_(min=smallest**2).rsqrt_().mul_(gradient)
    clipped = rate / (update.norm(2).double() / (length * group["d"])).clamp(min=1.0)
    weight.sub_(update.mul_(clipped.to(weight.dtype)))


def whole_access(
    parameters: Iterable[tuple[str, nn.Parameter]], placements: Mapping[str, ParameterPlacement], mesh: ParallelMesh
) -> WholeAccess:
    """Return the access to whole tensors for the parameters of a model, by their names in `placements`."""
    return WholeAccess({parameter: placements[name] for name, parameter in parameters}, mesh)
