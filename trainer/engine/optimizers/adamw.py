"""AdamW in fp32, and its part of optimizers that update some parameters in another way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainer.engine.optimizers.base import EngineOptimizer
from trainer.engine.optimizers.parameters import Groups, TrainedParameters
from trainer.recipe import schema


def adamw_options(section: schema.AdamWKeys, trained: TrainedParameters) -> dict[str, Any]:
    first, second = section.betas
    return {"lr": section.learning_rate, "betas": (first, second), "eps": section.epsilon, "fused": trained.fused}


class PartlyAdamW(EngineOptimizer, torch.optim.AdamW):
    """AdamW of torch for some parameter groups; a subclass updates those that have its `key`."""

    key: str

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

    def update(self, groups: Groups) -> None:
        """Update the parameters of groups with `key`."""
        raise NotImplementedError


class AdamW(EngineOptimizer, torch.optim.AdamW):
    """AdamW of torch."""

    @classmethod
    def build(cls, section: schema.AdamW, trained: TrainedParameters) -> AdamW:
        return cls(trained.groups(section), **adamw_options(section, trained))
