"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from trainer.engine.optimizers.base import EngineOptimizer
from trainer.engine.optimizers.parameters import TrainedParameters
from trainer.engine.optimizers.tensor_batches import stepped
from trainer.parallel.shards.gathering import local_part
from trainer.recipe import schema

_OPTIONS = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize", "foreach", "fused")


class SGD(EngineOptimizer, torch.optim.SGD):
    """Torch's SGD, with two differences, so that its fused kernel can skip a bad step under every layout.

    - It steps the shards of DTensors, which torch does not fuse here.
    - Momentum begins as zeros, with the same result: torch's is undefined after a skipped first step.
    """

    @classmethod
    def build(cls, section: schema.SGD, trained: TrainedParameters) -> SGD:
        groups = trained.groups(section)
        return cls(groups, lr=section.learning_rate, momentum=section.momentum, fused=trained.fused)

    def state_shapes(self, parameter: nn.Parameter, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {"momentum_buffer": shape} if self.defaults["momentum"] else {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = stepped(group["params"])
            sgd(
                [local_part(parameter) for parameter in parameters],
                [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None],
                [self._momentum(parameter) if group["momentum"] else None for parameter in parameters],
                found_inf=self.found_inf,
                **{key: group[key] for key in _OPTIONS},
            )

    def _momentum(self, parameter: nn.Parameter) -> Tensor:
        state = self.state[parameter]
        if not state:
            # Torch would copy the first gradient, which is momentum * 0 + gradient: dampening is 0 here.
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return local_part(state["momentum_buffer"])
