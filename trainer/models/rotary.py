"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864) with fewer operations backward.

Transformers turns the halves of heads by slices, and autograd fills a whole tensor with zeros for each slice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_NAME = "rotate_half"


class _RotatedHalf(torch.autograd.Function):
    """The halves of the last dimension of `x [..., size]` exchanged, the new first one negated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        # The first part of the output has the second half of `x`, which is the longer one for an odd size.
        half = gradient.shape[-1] - gradient.shape[-1] // 2
        return torch.cat((gradient[..., half:], -gradient[..., :half]), dim=-1)


class CheapRotation:
    """A context in which the layers of a model rotate with these operations; the numbers are those of transformers."""

    def __init__(self, model: nn.Module) -> None:
        names = {name for module in model.modules() if (name := type(module).__module__).startswith("transformers.")}
        # Model files call the function by its name in their module, so that name is replaced.
        spaces = [vars(sys.modules[name]) for name in sorted(names)]
        self._replaced = [(space, space[_NAME]) for space in spaces if _NAME in space and _is_known(space[_NAME])]

    def __enter__(self) -> None:
        for space, _ in self._replaced:
            space[_NAME] = _RotatedHalf.apply

    def __exit__(self, *_: object) -> None:
        for space, original in self._replaced:
            space[_NAME] = original


def _is_known(rotate: Callable[[Tensor], Tensor]) -> bool:
    """Return whether a function exchanges halves; that of Cohere exchanges neighbours."""
    x = torch.arange(1.0, 7.0)
    return torch.equal(rotate(x), torch.tensor([-4.0, -5.0, -6.0, 1.0, 2.0, 3.0]))
