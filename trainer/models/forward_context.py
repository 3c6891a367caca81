"""A context around the forward function of a module that stays unmodified otherwise."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

_CONTEXT = "_forward_context"


def run_within(module: nn.Module, context: Callable[[Any], AbstractContextManager[Any]]) -> None:
    """Run every forward pass of `module` inside of `context(module)`.

    The module gets a derived class. Unlike a replaced function, a class survives a copy of the module, and unlike a
    hook, it also applies if the caller calls `forward` itself.

    Args:
        context: opens the context; it must refer to the module by its argument only.
    """
    assert not hasattr(module, _CONTEXT), "a module has one context"
    setattr(module, _CONTEXT, context)
    module.__class__ = _derived(type(module))  # type: ignore[arg-type]  # a class is hashable


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace the forward function of `module` by that of a derived class, as in `run_within`."""
    module.__class__ = with_method(type(module), "forward", forward)  # type: ignore[arg-type]  # a class is hashable


@functools.cache
def _derived(base: type[nn.Module]) -> type[nn.Module]:
    base_forward = base.forward

    @functools.wraps(base_forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with getattr(self, _CONTEXT)(self):
            return base_forward(self, *args, **kwargs)

    return with_method(base, "forward", forward)  # type: ignore[arg-type]


@functools.cache
def with_method(base: type[nn.Module], name: str, method: Callable[..., Any]) -> type[nn.Module]:
    """Return a class derived from `base` with another method `name`, the same class for the same arguments."""
    # transformers finds settings of a class by its printed name.
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (base,), {name: method, **names})
