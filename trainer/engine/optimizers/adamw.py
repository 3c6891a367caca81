"""AdamW in fp32, and its part of optimizers that update some parameters in another way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.engine.optimizers.base import EngineOptimizer
from trainer.engine.optimizers.parameters import Groups, TrainedParameters
from trainer.parallel.kernel_support import KERNELS, missing
from trainer.parallel.shards.gathering import local_part
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
    """AdamW, stepped by the registered kernel where it runs, and else by torch."""

    _by_kernel: Any = "the recipe changes its update"  # that of the kernel, or the reason why torch steps

    @classmethod
    def build(cls, section: schema.AdamW, trained: TrainedParameters) -> AdamW:
        optimizer = cls(trained.groups(section), **adamw_options(section, trained))
        device = next((local_part(parameter).device for parameter in trained.trainable.values()), torch.device("cpu"))
        optimizer._by_kernel = missing("adamw", device) or KERNELS["adamw"].updates(optimizer, trained)
        return optimizer

    @property
    def scales_gradients(self) -> bool:  # type: ignore[override]
        return not isinstance(self._by_kernel, str)

    @property
    def tables(self) -> Sequence[Tensor]:  # type: ignore[override]
        return () if isinstance(self._by_kernel, str) else self._by_kernel.tables

    def notes(self, device: torch.device) -> list[str]:  # type: ignore[override]
        if device.type != "cuda":
            return []
        if self.scales_gradients:
            return ["one kernel clips gradients, steps adamw and rounds the weights of the next step"]
        return [f"torch steps adamw, and not the fused kernel, because {self._by_kernel}"]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        if self.scales_gradients:
            self._by_kernel.step(self.found_inf, self.factor)
            return None
        loss: float | None = super().step(closure)
        return loss
