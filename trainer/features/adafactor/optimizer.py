"""Adafactor: the second moments of a matrix as a row and a column."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.engine.optimizers.base import EngineOptimizer
from trainer.engine.optimizers.parameters import Groups, TrainedParameters
from trainer.engine.optimizers.skipping import write_unless
from trainer.engine.optimizers.tensor_batches import stack_of
from trainer.engine.optimizers.whole_access import WholeAccess, gradients_of
from trainer.features.adafactor import section as schema
from trainer.parallel.shards.gathering import local_part


class Adafactor(EngineOptimizer):
    """Adafactor (Shazeer & Stern 2018, arXiv:1804.04235): second moments of a matrix as a row and a column.

    Row and column are whole on every rank, which costs little memory. The update is that of torch's class, which waits
    for the device twice for each parameter; here, its numbers stay on the device.
    """

    updates_in_batches = True
    whole_keys = frozenset(("step", "row_var", "col_var", "variance"))

    def __init__(self, groups: Groups, whole: WholeAccess, **options: Any) -> None:
        super().__init__(groups, options)
        self._whole = whole

    @classmethod
    def build(cls, section: schema.Adafactor, trained: TrainedParameters) -> Adafactor:
        return cls(
            trained.groups(section),
            trained.whole,
            lr=section.learning_rate,
            beta2_decay=section.beta2_decay,
            d=section.clip_threshold,
            eps2=section.minimum_scale,
        )

    def state_shapes(self, parameter: nn.Parameter, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {key: tuple(zeros.shape) for key, zeros in _zeros_for(torch.empty(shape, device="meta")).items()}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for batch in self._whole.batches(group["params"]):
                self._update(batch, group)

    def _update(self, batch: Sequence[nn.Parameter], group: Mapping[str, Any]) -> None:
        weights = [local_part(parameter.detach()) for parameter in batch]
        own = stack_of(weights)
        whole, gradient = (self._whole.gather(batch, parts) for parts in (own, stack_of(gradients_of(batch))))
        for parameter, like in zip(batch, gradient, strict=True):
            if not self.state[parameter]:
                self.state[parameter].update(_zeros_for(like))
        # The parameters of a batch have one shape, so the first one has the keys of all.
        keys = [key for key in self.state[batch[0]] if key in self.whole_keys]
        states = {key: [self.state[parameter][key] for parameter in batch] for key in keys}
        old = {key: stack_of(tensors) for key, tensors in states.items()}
        updated, new = _factored_update(whole, gradient, old, group)
        del whole, gradient
        # In a bad step, the flag on the device keeps the old numbers, and the host need not wait for it.
        flag = self.found_inf
        write_unless(flag, weights, own, self._whole.parts(batch, updated))
        for key, tensors in states.items():
            write_unless(flag, tensors, old[key], new[key])


def _zeros_for(gradient: Tensor) -> dict[str, Tensor]:
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
        state: their state `[n, ...]`, by key.
        group: the options of Adafactor.
    """

    def spread(numbers: Tensor) -> Tensor:
        return numbers.to(weight.dtype).view(-1, *(1,) * (weight.dim() - 1))

    def norms(tensors: Tensor) -> Tensor:
        found: Tensor = torch.linalg.vector_norm(tensors.reshape(len(tensors), -1), dim=1)
        # In fp64, because torch's class computes the rate and the clipping with Python's numbers.
        return found.double()

    smallest, length = torch.finfo(weight.dtype).eps, weight[0].numel() ** 0.5
    new = {"step": state["step"] + 1}
    steps = new["step"].double()
    fresh = spread(steps.pow(group["beta2_decay"]))  # the share of the new second moment
    # alpha = max(eps2, RMS(weight)) * min(lr, 1 / sqrt(t)), the relative step of the paper
    rate = steps.rsqrt().clamp(max=group["lr"]) * (norms(weight) / length).clamp(min=group["eps2"])
    if "variance" in state:
        new["variance"] = state["variance"].lerp(gradient.square(), fresh)
        # The default `eps1` of torch's class is the epsilon of the type, and it bounds the second moment by its square.
        update = new["variance"].clamp(min=smallest**2)
    else:
        for key, dim in (("row_var", -1), ("col_var", -2)):
            # The mean of the squares of a row or column.
            square = gradient.norm(dim=dim, keepdim=True).square_().div_(gradient.size(dim))
            new[key] = state[key].lerp(square, fresh)
        row, column = new["row_var"], new["col_var"]
        # The second moment as a product of rank 1: row times column, divided by their common mean.
        update = (row * column).div_(row.mean(dim=-2, keepdim=True).clamp_(min=smallest)).clamp_(min=smallest**2)
    update.rsqrt_().mul_(gradient)
    clipped = rate / (norms(update) / (length * group["d"])).clamp(min=1.0)
    return update.mul_(spread(-clipped)).add_(weight, alpha=1 - group["lr"] * group["weight_decay"]), new
