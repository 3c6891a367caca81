"""Exponential moving averages of the weights, beside any optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from trainer.engine.optimizers.base import OptimizerUpdate
from trainer.engine.optimizers.tensor_batches import stepped
from trainer.features.averages.section import AverageKeys
from trainer.parallel.shards.gathering import local_part

_OTHER = "other_weights"
"""The key of the state: the averages while parameters hold the trained weights, and the other way round."""
_STEPS = "averages.steps"
"""The number of good steps that the averages have seen."""


class Averages(OptimizerUpdate):
    """Averages the weights after each step of an optimizer, as `torch.optim.swa_utils` does.

    The first good step sets the average. Evaluations, checkpoints and exports have averages. A bad step changes none.
    """

    reads_gradients = False
    _is_shown = False
    _num_averaged = 0

    @property
    def decay(self) -> float:
        """The share of the old average in the new one."""
        decay = cast(AverageKeys, self.recipe.training).ema_decay
        assert decay is not None
        return decay

    def notes(self, device: torch.device) -> list[str]:  # type: ignore[override]
        text = (
            f"evaluations, checkpoints and exports have averages of the weights (`training.ema_decay` {self.decay:g})"
        )
        return [*super().notes(device), text]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        trained = [parameter for group in self.param_groups for parameter in stepped(group["params"])]
        loss = super().step(closure)
        share: float | Tensor = 1 - self.decay
        if self.found_inf is not None:
            # In a bad step the share is 0, so the average stays.
            share = share * (1 - self.found_inf)
        for parameter in trained:
            state = self.state[parameter]
            # If all earlier steps were bad, the state holds weights that are no average yet.
            if _OTHER in state and self._num_averaged:
                average = local_part(state[_OTHER])
                weight = share.to(average.dtype) if isinstance(share, Tensor) else share
                average.lerp_(local_part(parameter.detach()), weight)
            else:
                state[_OTHER] = parameter.detach().clone()
        # Bad steps count here too, until `count_as` brings the number of good ones from flags that the host has read.
        self._num_averaged += 1
        return loss

    def scalars(self) -> dict[str, float]:
        return {**super().scalars(), _STEPS: self._num_averaged}

    def count_as(self, scalars: Mapping[str, float]) -> None:
        super().count_as(scalars)
        self._num_averaged = int(scalars[_STEPS])

    def state_shapes(self, parameter: nn.Parameter, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {**super().state_shapes(parameter, shape), _OTHER: shape}

    def show(self) -> bool:
        return self._swap(to_averages=True)

    def hide(self) -> bool:
        return self._swap(to_averages=False)

    def load(self, scalars: Mapping[str, float]) -> None:
        super().load(scalars)
        self._num_averaged = int(scalars[_STEPS])
        # Checkpoints are saved while parameters hold the averages, so a loaded one holds them too.
        self._is_shown = True

    @torch.no_grad()
    def _swap(self, to_averages: bool) -> bool:
        if self._is_shown == to_averages:
            return False
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            other = self.state.get(parameter, {}).get(_OTHER)
            if other is not None:
                held = parameter.detach().clone()
                parameter.copy_(other)
                other.copy_(held)
        self._is_shown = to_averages
        return True
