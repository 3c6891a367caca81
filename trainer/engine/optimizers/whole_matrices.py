"""Muon and Adafactor under every layout: their update of a matrix depends on all of its elements.

The matrices of a batch are gathered one by one. All ranks compute their whole update and keep their parts, so a layout
changes rounding only. Parameters of one shape are stacked and updated at once, so that a GPU starts few kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, EPS, _adjust_lr, _zeropower_via_newtonschulz
from transformers.pytorch_utils import Conv1D

from trainer.engine.optimizers.batches import alike, batches, most_elements, stack_of, stepped
from trainer.engine.optimizers.skipping import flag_of, write_unless
from trainer.models.families.table import layers_of
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.placement import ParameterPlacement
from trainer.parallel.shards.gathering import gather_on_all, is_whole, local_part, part_like
from trainer.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear

_LINEAR = (nn.Linear, Conv1D, ColumnParallelLinear, RowParallelLinear)
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

    def batches(self, parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Yield batches of parameters of one shape and placement that have gradients; on all ranks in one order."""

        def kind(one: nn.Parameter) -> Hashable:
            placement = self.placement(one)
            return placement.shape, placement.splits, one.dtype

        for group in alike(stepped(parameters), kind):
            most = most_elements(local_part(group[0]).device)
            yield from batches(group, lambda one: prod(self.placement(one).shape), most)

    def _cut_over(self, batch: Sequence[nn.Parameter]) -> ParallelMesh | None:
        """Return the mesh if its ranks have parts of the parameters of a batch."""
        mesh, first = self.mesh, batch[0]
        return None if mesh is None or is_whole(first, self.placements[first], mesh) else mesh

    def gather(self, parameters: Sequence[nn.Parameter], parts: Tensor) -> Tensor:
        """Return whole tensors on every rank for this rank's parts; a collective for each one that is sharded.

        Args:
            parameters: parameters of one batch.
            parts: plain tensors `[n, *shape]` with the shape of this rank's parts of them.
        """
        if (mesh := self._cut_over(parameters)) is None:
            return parts
        gathered = partial(gather_on_all, mesh=mesh)
        return stack_of(
            [gathered(part, one, self.placements[one]) for one, part in zip(parameters, parts, strict=True)]
        )

    def parts(self, parameters: Sequence[nn.Parameter], whole: Tensor) -> Tensor:
        """Return this rank's parts of whole tensors `[n, *shape]`."""
        if (mesh := self._cut_over(parameters)) is None:
            return whole
        cut = partial(part_like, mesh=mesh)
        return stack_of([cut(full, one, self.placements[one]) for one, full in zip(parameters, whole, strict=True)])


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
            for batch in self._whole.batches(group["params"]):
                self._update(batch, group)

    def _update(self, batch: Sequence[nn.Parameter], group: Mapping[str, Any]) -> None:
        for parameter in batch:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        flag = flag_of(self)
        momenta = [local_part(self.state[parameter]["momentum_buffer"]) for parameter in batch]
        gradient, old = stack_of(_gradients(batch)), stack_of(momenta)
        momentum = old.lerp(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"]).bfloat16()  # Nesterov's
        write_unless(flag, momenta, old, momentum)
        del gradient, old, momentum
        whole = self._whole.gather(batch, update)
        rate = _adjust_lr(group["lr"], "match_rms_adamw", whole.shape[1:])
        update = self._whole.parts(batch, orthogonalised(whole, group["iterations"]))
        weights = [local_part(parameter.detach()) for parameter in batch]
        old = stack_of(weights)
        write_unless(flag, weights, old, (old * (1 - group["lr"] * group["weight_decay"])).add_(update, alpha=-rate))


def orthogonalised(matrices: Tensor, iterations: int) -> Tensor:
    """Return matrices with singular values near 1, by the Newton-Schulz iterations of torch's Muon in batched products.

    `torch.func.vmap` of torch's own function would round to bf16 between a product and its sum, with twice the error.

    Args:
        matrices: the matrices, bf16 `[n, rows, columns]`, which may be overwritten.
        iterations: the number of iterations.
    """
    if len(matrices) == 1:  # batched products of one matrix are slower on a CPU
        return _zeropower_via_newtonschulz(matrices[0], (DEFAULT_A, DEFAULT_B, DEFAULT_C), iterations, EPS).unsqueeze(0)
    is_tall = matrices.size(-2) > matrices.size(-1)
    found = matrices.mT if is_tall else matrices
    # Singular values are 1 at most.
    found = found / torch.linalg.matrix_norm(found, keepdim=True).clamp(min=EPS)
    for _ in range(iterations):
        gram = found @ found.mT
        found = torch.baddbmm(
            found, torch.baddbmm(gram, gram, gram, beta=DEFAULT_B, alpha=DEFAULT_C), found, beta=DEFAULT_A
        )
    return found.mT if is_tall else found


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
            for batch in self._whole.batches(group["params"]):
                self._update(batch, group)

    def _update(self, batch: Sequence[nn.Parameter], group: Mapping[str, Any]) -> None:
        weights = [local_part(parameter.detach()) for parameter in batch]
        own = stack_of(weights)
        whole, gradient = (self._whole.gather(batch, parts) for parts in (own, stack_of(_gradients(batch))))
        for parameter, like in zip(batch, gradient, strict=True):
            if not self.state[parameter]:
                self.state[parameter].update(_zeros_for(like))
        states = {key: [self.state[parameter][key] for parameter in batch] for key in self.state[batch[0]]}
        old = {key: stack_of(tensors) for key, tensors in states.items()}
        updated, new = _factored_update(whole, gradient, old, group)
        del whole, gradient
        flag = flag_of(self)
        write_unless(flag, weights, own, self._whole.parts(batch, updated))
        for key, tensors in states.items():
            write_unless(flag, tensors, old[key], new[key])


def _gradients(batch: Iterable[nn.Parameter]) -> list[Tensor]:
    return [local_part(parameter.grad) for parameter in batch if parameter.grad is not None]


def _zeros_for(gradient: Tensor) -> dict[str, Tensor]:
    """Return the first state for a whole gradient."""
    step = torch.zeros((), device=gradient.device)
    if gradient.dim() < 2:
        return {"step": step, "variance": torch.zeros_like(gradient)}
    *rows, columns = gradient.shape
    return {
        "step": step,
        "row_var": gradient.new_zeros((*rows, 1)),
        "col_var": gradient.new_zeros((*rows[:-1], 1, columns)),
    }


def _factored_update(
    weight: Tensor, gradient: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return whole tensors and their state after an update, relative to the size of each, and clipped by its own norm.

    Args:
        weight: the tensors `[n, *shape]`.
        gradient: their gradients.
        state: their state `[n, ...]`, by key.
        group: the options of Adafactor.
    """

    def spread(numbers: Tensor) -> Tensor:
        return numbers.to(weight.dtype).view(-1, *(1,) * (weight.dim() - 1))

    def norms(tensors: Tensor) -> Tensor:
        found: Tensor = torch.linalg.vector_norm(tensors.reshape(len(tensors), -1), dim=1)
        return found.double()

    smallest, length = torch.finfo(weight.dtype).eps, weight[0].numel() ** 0.5
    new = {"step": state["step"] + 1}
    steps = new["step"].double()
    fresh = spread(steps.pow(group["beta2_decay"]))  # the share of the new second moment
    rate = steps.rsqrt().clamp(max=group["lr"]) * (norms(weight) / length).clamp(min=group["eps2"])
    if "variance" in state:
        new["variance"] = state["variance"].lerp(gradient.square(), fresh)
        update = new["variance"].clamp(min=smallest**2)
    else:
        for key, dim in (("row_var", -1), ("col_var", -2)):
            square = gradient.norm(dim=dim, keepdim=True).square_().div_(gradient.size(dim))
            new[key] = state[key].lerp(square, fresh)
        row, column = new["row_var"], new["col_var"]
        update = (row * column).div_(row.mean(dim=-2, keepdim=True).clamp_(min=smallest)).clamp_(min=smallest**2)
    update.rsqrt_().mul_(gradient)
    clipped = rate / (norms(update) / (length * group["d"])).clamp(min=1.0)
    return update.mul_(spread(-clipped)).add_(weight, alpha=1 - group["lr"] * group["weight_decay"]), new


def whole_access(
    parameters: Iterable[tuple[str, nn.Parameter]], placements: Mapping[str, ParameterPlacement], mesh: ParallelMesh
) -> WholeAccess:
    """Return the access to whole tensors for the parameters of a model, by their names in `placements`."""
    return WholeAccess({parameter: placements[name] for name, parameter in parameters}, mesh)
