"""StableAdamW: AdamW with updates that are clipped by the size of each tensor's update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from trainer.engine.optimizers.base import EngineOptimizer
from trainer.engine.optimizers.parameters import Groups, TrainedParameters
from trainer.engine.optimizers.skipping import write_unless
from trainer.engine.optimizers.tensor_batches import stack_of
from trainer.engine.optimizers.whole_access import WholeAccess, gradients_of
from trainer.features.stable_adamw import section as schema
from trainer.parallel.shards.gathering import local_part

_Batch = tuple[Sequence[nn.Parameter], Mapping[str, Any]]


class StableAdamW(EngineOptimizer):
    """AdamW with the update clipping of Adafactor.

    The learning rate of a tensor is divided by max(1, RMS), with RMS² = mean(gradient² / max(second moment, epsilon²))
    over the whole tensor. The moments are running means without a bias. Ranks with shards of tensors sum one number for
    each tensor.

    Source: Wortsman et al. 2023, arXiv:2304.13013, algorithm 2.
    """

    updates_in_batches = True
    whole_keys = frozenset(("step",))

    def __init__(self, groups: Groups, whole: WholeAccess, **options: Any) -> None:
        super().__init__(groups, options)
        self._whole = whole

    @classmethod
    def build(cls, section: schema.StableAdamW, trained: TrainedParameters) -> StableAdamW:
        options = {"lr": section.learning_rate, "betas": tuple(section.betas), "eps": section.epsilon}
        return cls(trained.groups(section), trained.whole, **options)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        batches: list[_Batch] = [
            (batch, group) for group in self.param_groups for batch in self._whole.batches(group["params"])
        ]
        squares = [self._measure(batch, group) for batch, group in batches]
        self._sum_over_ranks([batch for batch, _ in batches], squares)
        for (batch, group), square in zip(batches, squares, strict=True):
            self._update(batch, group, square)

    def _measure(self, batch: Sequence[nn.Parameter], group: Mapping[str, Any]) -> Tensor:
        """Update steps and second moments; return the sum of the squares of each scaled gradient, fp64 `[n]`."""
        for parameter in batch:
            if not self.state[parameter]:
                zeros = {key: self.blank(key, parameter) for key in ("exp_avg", "exp_avg_sq")}
                self.state[parameter] |= {"step": torch.zeros((), device=local_part(parameter).device), **zeros}
        steps = [local_part(self.state[parameter]["step"]) for parameter in batch]
        old_steps = torch.stack(steps)
        moments = self._moments(batch, "exp_avg_sq")
        gradient, old = stack_of(gradients_of(batch)), stack_of(moments)
        square = gradient.square()
        new = old.lerp(square, _fresh(group["betas"][1], old_steps + 1, old))
        sizes = square.div_(new.clamp(min=group["eps"] ** 2)).flatten(1).sum(dim=1, dtype=torch.float64)
        write_unless(self.found_inf, moments, old, new)
        write_unless(self.found_inf, steps, old_steps, old_steps + 1)
        return sizes

    def _sum_over_ranks(self, batches: Sequence[Sequence[nn.Parameter]], squares: Sequence[Tensor]) -> None:
        """Sum the numbers of sharded tensors over their axes, in place; a collective for each axis."""
        mesh = self._whole.mesh
        if mesh is None:
            return
        by_axes: dict[tuple[str, ...], list[Tensor]] = defaultdict(list)
        for batch, square in zip(batches, squares, strict=True):
            # The tensors of a batch are split alike.
            by_axes[tuple(map(mesh.plain_axis, self._whole.placement(batch[0]).split_axes))].append(square)
        # All ranks begin these sums in one order.
        for axes, numbers in sorted(by_axes.items(), key=lambda pair: pair[0]):
            joined = torch.cat(numbers)
            for axis in axes:
                mesh.sum_(joined, axis)
            torch._foreach_copy_(numbers, list(torch.split(joined, [len(part) for part in numbers])))

    def _update(self, batch: Sequence[nn.Parameter], group: Mapping[str, Any], square: Tensor) -> None:
        """Update first moments and weights.

        Args:
            square: the sum of the squares of the scaled gradient of each whole tensor, fp64 `[n]`.
        """
        size = (square / prod(self._whole.placement(batch[0]).shape)).sqrt()
        rate = group["lr"] / size.clamp(min=1.0)
        steps = torch.stack([local_part(self.state[parameter]["step"]) for parameter in batch])
        moments, weights = self._moments(batch, "exp_avg"), [local_part(parameter.detach()) for parameter in batch]
        old, own = stack_of(moments), stack_of(weights)
        new = old.lerp(stack_of(gradients_of(batch)), _fresh(group["betas"][0], steps, old))
        scale = stack_of(self._moments(batch, "exp_avg_sq")).sqrt().add_(group["eps"])
        update = (new / scale).add_(own, alpha=group["weight_decay"])
        write_unless(self.found_inf, weights, own, own - update * _spread(rate, own))
        write_unless(self.found_inf, moments, old, new)

    def _moments(self, batch: Sequence[nn.Parameter], key: str) -> list[Tensor]:
        return [local_part(self.state[parameter][key]) for parameter in batch]


def _fresh(beta: float, steps: Tensor, like: Tensor) -> Tensor:
    """Return the share of the newest value in a running mean without a bias, for each tensor of a stack."""
    # 1 - beta * (1 - beta^(t-1)) / (1 - beta^t), in fp64: the powers are near 1 in the first steps
    counts = steps.double().clamp(min=1)
    return _spread((1 - beta) / (1 - beta**counts), like)


def _spread(numbers: Tensor, like: Tensor) -> Tensor:
    return numbers.to(like.dtype).view(-1, *(1,) * (like.dim() - 1))
