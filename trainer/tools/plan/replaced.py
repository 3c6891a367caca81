"""Replacement of functions and state of other libraries, for those that offer no other way to simulate a rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

_MISSING = object()


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Give attributes of a module, a class or an object other values in this context."""
    before = {name: vars(owner).get(name, _MISSING) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def within(context: Callable[[], AbstractContextManager[Any]], function: Any) -> Any:
    """Return a function, or a property, that does its work in a context."""
    if isinstance(function, property):
        return property(within(context, function.fget))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with context():
            return function(*args, **kwargs)

    return call
