"""Inputs of matrix products in 16 bits, rounded once for all products that share an input.

Autocast rounds an input for each product, and returns each of its gradients to fp32 before it adds them. Here products
share one rounded copy, and each gradient is added as it is. The sums, and their order, are those of autocast.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.parallel.rounded_inputs import COPY, current_copy

_USERS = "input_users"
"""The attribute of a layer that rounds its input, with its `Users`."""


@dataclass
class Users:
    """The most products so far that shared an input of a layer, which is the first of them."""

    number: int = 1


class _Copy:
    """The rounded copy of a tensor for products, and the tensor in fp32 for its other users."""

    def __init__(self, x: Tensor, dtype: torch.dtype, users: Users) -> None:
        self.exact = x
        # A change of `x` in place raises its version, and this copy is then out of date.
        self.version = x._version
        self._rounded = x.detach().to(dtype)
        self._users = users
        self._taken = 0
        self._left: list[Tensor] = []

    def take(self) -> Tensor:
        """Return the copy for one more product."""
        if not self._left:
            # As many copies as products took of the last input, so that one node of autograd adds all their gradients.
            number = max(1, self._users.number - self._taken)
            self.exact, *self._left = _Shared.apply(self.exact, self._rounded, number)  # type: ignore[no-untyped-call]
        self._taken += 1
        self._users.number = max(self._users.number, self._taken)
        return self._left.pop(0)


class _Shared(torch.autograd.Function):
    """A tensor, and its rounded copy for each of several products, which add their gradients to that of the tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor, number: int) -> tuple[Tensor, ...]:
        # A copy without a gradient gets None; zeros would cost a sum.
        ctx.set_materialize_grads(False)
        # `x` holds its copy, and a view would hold `x`: the collector cannot free such a circle.
        return x.detach(), *(rounded.detach() for _ in range(number))

    @staticmethod
    def backward(ctx: Any, exact: Tensor | None, *rounded: Tensor | None) -> tuple[Tensor | None, None, None]:
        total = exact
        for gradient in reversed(rounded):  # as autograd, which adds the gradient of the last product first
            if gradient is not None:
                # The sum is in fp32, as autocast adds the gradients that it has returned to fp32.
                total = gradient.float() if total is None else total + gradient
        return total, None, None


def share_rounded_inputs(layers: Iterable[nn.Module]) -> None:
    """Let layers that compute one product of their first argument share rounded copies of it, under autocast."""
    for layer in layers:
        setattr(layer, _USERS, Users())
        layer.register_forward_pre_hook(_round_input)


def take_users(layer: nn.Module) -> Users | None:
    """Let a layer no longer round its input, and return new users for the one that does; None: the layer did not."""
    return None if vars(layer).pop(_USERS, None) is None else Users()


def _round_input(layer: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    users: Users | None = getattr(layer, _USERS, None)
    if users is None or not arguments:  # passed by its name
        return None
    return (rounded_input(arguments[0], users), *arguments[1:])


def rounded_input(x: Tensor, users: Users) -> Tensor:
    """Return the rounded copy of an input for one more product, or the input itself, which autocast rounds."""
    kind = x.device.type
    # Without a gradient, or for a leaf, which may live longer than a pass, autocast rounds.
    if not torch.is_grad_enabled() or x.grad_fn is None:
        return x
    if x.dtype != torch.float32 or not torch.is_autocast_enabled(kind):
        return x
    copy: Any = current_copy(x)
    if copy is None:
        copy = _Copy(x, torch.get_autocast_dtype(kind), users)
        setattr(x, COPY, copy)
    taken: Tensor = copy.take()
    return taken
