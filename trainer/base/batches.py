"""Consecutive items in batches of a largest size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

_Item = TypeVar("_Item")


def batches(items: Iterable[_Item], size: Callable[[_Item], int], most: int) -> Iterator[list[_Item]]:
    """Yield consecutive items with a size of at most `most` in all; a larger item is alone."""
    batch: list[_Item] = []
    total = 0
    for item in items:
        number = size(item)
        if batch and total + number > most:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += number
    if batch:
        yield batch
