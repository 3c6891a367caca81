"""Schedule-free AdamW (Defazio et al. 2024, arXiv:2405.15682): averaged weights in place of a decaying rate.

The update is that of the package schedulefree. Its own switch between the two points of a training rounds, so an
evaluation would change the training. The switch of this module keeps the weights instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.base.distribution import install_command
from trainer.base.errors import UsageError
from trainer.engine.optimizers.batches import batches, most_elements, stepped
from trainer.engine.optimizers.skipping import flag_of, unchanged_if
from trainer.parallel.shards.gathering import local_part

NAME = "schedule_free_adamw"
TRAINED = "y"
"""The key of the optimizer's state under which the trained weights are kept while parameters hold averages."""
_SCALARS = ("k", "weight_sum", "lr_max")  # steps taken, sum of the weights of the average, largest learning rate
_PREFIX = "schedule_free."


def require_package(name: str) -> Any:
    """Return the package of the optimizer `name`, if it needs one.

    Raises:
        UsageError: the package is not installed.
    """
    if name != NAME:
        return None
    try:
        import schedulefree
    except ImportError as error:
        raise UsageError(
            f"`optimizer.name` is {name}, which needs the package schedulefree; install it"
            f" ({install_command('schedule-free')}) or use adamw ({error})"
        ) from error
    return schedulefree


def schedule_free_adamw(groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    """Return the package's optimizer for parameter groups, ready for a step.

    A flag on the device skips a bad step. The counts on the host include it until `AveragedWeights.count_as`.
    """

    class Skipping(require_package(NAME).AdamWScheduleFree):  # type: ignore[misc]
        param_groups: list[dict[str, Any]]

        @torch.no_grad()
        def step(self, closure: Callable[[], float] | None = None) -> float | None:
            flag, groups = flag_of(self), self.param_groups
            if flag is None:
                return super().step(closure)  # type: ignore[no-any-return]
            try:
                for group in groups:
                    self._step(group, flag)
            finally:
                self.param_groups = groups
            return None

        def _step(self, group: dict[str, Any], flag: Tensor) -> None:
            parameters = stepped(group["params"])
            for parameter in parameters:
                if not self.state[parameter]:  # the package would begin with the squares of a bad step
                    self.state[parameter] |= {
                        "z": parameter.detach().clone(),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
            most = most_elements(flag.device)
            parts = list(batches(parameters, lambda parameter: local_part(parameter).numel(), most))
            for batch in parts or [[]]:  # a group without gradients counts too
                part = {**group, "params": batch}
                self.param_groups = [part]
                changed = [tensor for one in batch for tensor in (one.detach(), *self.state[one].values())]
                with unchanged_if(flag, *map(local_part, changed)):
                    super().step()
            group.update({key: part[key] for key in _SCALARS})

    optimizer = Skipping(groups, **options)
    optimizer.train()  # a flag only; weights change in the first step
    return optimizer


class AveragedWeights:
    """The averaged weights x of a model, for evaluations, checkpoints and exports; training runs at y.

    Parameters hold y or x. Meanwhile the optimizer's state keeps y, which takes the memory of the gradients. These are
    free then, except when the run looks for the rows of a bad step.

    Args:
        optimizer: the optimizer of `schedule_free_adamw`.
        changed: a function that is called after each change of all weights; it may be a collective.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, changed: Callable[[], None]) -> None:
        self._optimizer = optimizer
        self._changed = changed
        self._is_shown = False

    @torch.no_grad()
    def show(self) -> None:
        """Put x into the parameters; before the first step, x is y."""
        if self._is_shown:
            return
        for parameter, state, beta in self._stepped():
            state[TRAINED] = parameter.detach().clone()
            parameter.lerp_(state["z"], 1 - 1 / beta)  # y = (1 - beta) z + beta x
        self._is_shown = True
        self._changed()

    @torch.no_grad()
    def hide(self) -> None:
        """Put y back, bit for bit."""
        if not self._is_shown:
            return
        for parameter, state, _ in self._stepped():
            parameter.copy_(state.pop(TRAINED))
        self._is_shown = False
        self._changed()

    def state(self) -> dict[str, float]:
        """Return the numbers that all parameters share, for a checkpoint."""
        group = self._optimizer.param_groups[0]
        return {f"{_PREFIX}{key}": group[key] for key in _SCALARS}

    def count_as(self, scalars: Mapping[str, float]) -> None:
        """Set the numbers that `state` returned, which leaves out a bad step after it."""
        for group in self._optimizer.param_groups:
            group.update({key: scalars[f"{_PREFIX}{key}"] for key in _SCALARS})

    def load_state(self, scalars: Mapping[str, float]) -> None:
        """Load the numbers that `state` returned, beside tensors that were saved while averages were shown."""
        self.count_as(scalars)
        self._is_shown = True
        self._changed()

    def _stepped(self) -> Iterator[tuple[nn.Parameter, dict[str, Tensor], float]]:
        """Yield each parameter that was updated, its state, and the share of x in y."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if state := self._optimizer.state.get(parameter):
                    yield parameter, state, group["betas"][0]
