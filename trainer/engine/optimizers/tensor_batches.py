"""Batches of tensors that an optimizer updates at once, so that a GPU starts few kernels, in bounded memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from trainer.parallel.device_traits import traits_of

_Item = TypeVar("_Item")

MOST, MOST_ON_CPU = 2**23, 2**18
"""The most elements of a batch on a GPU, to bound its temporary copies, and on a CPU, for its caches.

A larger tensor is alone.
"""


def most_elements(device: torch.device) -> int:
    return MOST_ON_CPU if traits_of(device).is_cpu else MOST


def takes_lists(device: torch.device) -> bool:
    """Return whether kernels for lists of tensors pay on a device, or in a plan for it."""
    return most_elements(device) == MOST


def stepped(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters that have gradients."""
    return [parameter for parameter in parameters if parameter.grad is not None]


def alike(items: Iterable[_Item], key: Callable[[_Item], Hashable]) -> list[list[_Item]]:
    """Return items in groups of equal keys, in the order of their first items."""
    groups: defaultdict[Hashable, list[_Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return list(groups.values())


def stack_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors of one shape as `[n, *shape]`: a copy, unless it is one tensor."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))
