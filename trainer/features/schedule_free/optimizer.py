"""Schedule-free AdamW (Defazio et al. 2024, arXiv:2405.15682): averaged weights in place of a decaying rate.

The update is that of the package schedulefree. Its own switch between the two points of a training rounds, so an
evaluation would change the training. The switch of this module keeps the weights instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.base.batches import batches
from trainer.base.distribution import install_command
from trainer.base.errors import UsageError
from trainer.engine.optimizers.base import EngineOptimizer
from trainer.engine.optimizers.parameters import RATE, TrainedParameters
from trainer.engine.optimizers.skipping import unchanged_if
from trainer.engine.optimizers.tensor_batches import most_elements, stepped, takes_lists
from trainer.features.schedule_free import section as schema
from trainer.parallel.shards.gathering import local_part

_TRAINED = "y"
"""The key of the state under which the trained weights are kept while parameters hold averages."""
_SCALARS = ("k", "weight_sum", "lr_max")
"""Steps taken, sum of the weights of the average, largest learning rate; in a group, those without its own rate."""
_PREFIX = "schedule_free."


def _package() -> Any:
    try:
        import schedulefree
    except ImportError as error:
        raise UsageError(
            "`optimizer.name` is schedule_free_adamw, which needs the package schedulefree; install it"
            f" ({install_command('schedule-free')}) or use adamw ({error})"
        ) from error
    return schedulefree


class ScheduleFreeAdamW(EngineOptimizer):
    """The differences to the package's optimizer, which `build` puts below this class.

    Training runs at y; evaluations, checkpoints and exports have the averaged weights x. Parameters hold y or x.
    Meanwhile the state keeps y, which takes the memory of the gradients. These are free then, except when the run looks
    for the rows of a bad step.

    The flag of a bad step leaves out the numbers that the host counts.
    """

    updates_in_batches = True
    _is_shown = False

    @classmethod
    def build(cls, section: schema.ScheduleFreeAdamW, trained: TrainedParameters) -> EngineOptimizer:
        made: Any = type(cls.__name__, (cls, _package().AdamWScheduleFree), {})
        optimizer = made(
            trained.groups(section),
            lr=section.learning_rate,
            betas=tuple(section.betas),
            eps=section.epsilon,
            foreach=all(takes_lists(parameter.device) for parameter in trained.trainable.values()),
        )
        optimizer.train()  # a flag only; weights change in the first step
        return optimizer  # type: ignore[no-any-return]

    @classmethod
    def require_package(cls) -> None:
        _package()

    def state_shapes(self, parameter: nn.Parameter, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(("z", "exp_avg_sq", _TRAINED), shape)  # a checkpoint has the averages

    def state_bytes(self, parameter: nn.Parameter, shape: tuple[int, ...], number: int) -> int:
        return 8 * number  # while the weights are trained

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        groups = self.param_groups
        try:
            for group in groups:
                # For the own rate of a group, which changes no share of the average.
                weight_sum, largest = group["weight_sum"] * group[RATE] ** 2, group["lr_max"] * group[RATE]
                # A copy of the group: its parameters are updated, but its counters stay as they were.
                self._step({**group, "weight_sum": weight_sum, "lr_max": largest})
                # Without parameters, the step of the package only counts, at the rate of the recipe.
                base = {**group, "params": [], "lr": self.rate}
                self.param_groups = [base]
                super().step()
                group.update({key: base[key] for key in _SCALARS})
        finally:
            self.param_groups = groups
        return None

    def _step(self, group: Mapping[str, Any]) -> None:
        flag, parameters = self.found_inf, stepped(group["params"])
        for parameter in parameters:
            if not self.state[parameter]:  # the package would begin with the squares of a bad step
                self.state[parameter] |= {"z": parameter.detach().clone(), "exp_avg_sq": torch.zeros_like(parameter)}
        if not parameters:
            return
        most = most_elements(local_part(parameters[0]).device)
        for batch in batches(parameters, lambda parameter: local_part(parameter).numel(), most):
            self.param_groups = [{**group, "params": batch}]
            changed = [tensor for one in batch for tensor in (one.detach(), *self.state[one].values())]
            with unchanged_if(flag, *map(local_part, changed)):
                super().step()

    @torch.no_grad()
    def show(self) -> bool:
        """Put x into the parameters; before the first step, x is y."""
        if self._is_shown:
            return False
        for parameter, state, beta in self._stepped():
            state[_TRAINED] = parameter.detach().clone()
            # x from y and z: the formula at the end of the line gives y, and is solved for x here.
            parameter.lerp_(state["z"], 1 - 1 / beta)  # y = (1 - beta) z + beta x
        self._is_shown = True
        return True

    @torch.no_grad()
    def hide(self) -> bool:
        if not self._is_shown:
            return False
        for parameter, state, _ in self._stepped():
            # The kept bits return; computing y from x would round.
            parameter.copy_(state.pop(_TRAINED))
        self._is_shown = False
        return True

    def scalars(self) -> dict[str, float]:
        return {f"{_PREFIX}{key}": self.param_groups[0][key] for key in _SCALARS}

    def count_as(self, scalars: Mapping[str, float]) -> None:
        for group in self.param_groups:
            group.update({key: scalars[f"{_PREFIX}{key}"] for key in _SCALARS})

    def load(self, scalars: Mapping[str, float]) -> None:
        self.count_as(scalars)
        # Checkpoints are saved while parameters hold x, and the loaded state has y.
        self._is_shown = True

    def _stepped(self) -> Iterator[tuple[nn.Parameter, dict[str, Tensor], float]]:
        """Yield each parameter that was updated, its state, and the share of x in y."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if state := self.state.get(parameter):
                    yield parameter, state, group["betas"][0]
