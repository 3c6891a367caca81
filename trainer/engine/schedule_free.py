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
    """Return the package's optimizer for parameter groups, ready for a step."""
    optimizer: torch.optim.Optimizer = require_package(NAME).AdamWScheduleFree(groups, **options)
    optimizer.train()  # type: ignore[attr-defined]  # a flag only; weights change in the first step
    return optimizer


class AveragedWeights:
    """The averaged weights x of a model, for evaluations, checkpoints and exports; training runs at y.

    Parameters hold y or x. Meanwhile the optimizer's state keeps y, which takes the memory of the gradients that are
    free at this time.

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

    def load_state(self, scalars: Mapping[str, float]) -> None:
        """Load the numbers that `state` returned, beside tensors that were saved while averages were shown."""
        for group in self._optimizer.param_groups:
            group.update({key: scalars[f"{_PREFIX}{key}"] for key in _SCALARS})
        self._is_shown = True
        self._changed()

    def _stepped(self) -> Iterator[tuple[nn.Parameter, dict[str, Tensor], float]]:
        """Yield each parameter that was updated, its state, and the share of x in y."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if state := self._optimizer.state.get(parameter):
                    yield parameter, state, group["betas"][0]
