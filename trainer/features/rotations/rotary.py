"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864) in fewer operations, with the numbers of transformers.

Transformers turns the halves of heads by slices, and autograd fills a whole tensor with zeros for each slice. Models
such as ModernBERT rotate in fp32, by two copies of queries and keys, and a tensor for each operation. The gradients of
both copies are rounded there before they are added; here, their sum is.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.parallel.dtypes import at_least_fp32

_ROUNDED_ONCE = 5  # of 512 numbers in bf16: a processor may round a product and its sum once in fp32


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


class _Rotated(torch.autograd.Function):
    """`x * cos + rotate_half(x) * sin` in fp32, in the type of `x`.

    `x` is `[..., size]` with an even size; cosines and sines are in fp32 and broadcast to it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        low, high = sin.chunk(2, dim=-1)
        return _turned(x, cos, -1, low, high)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        low, high = sin.chunk(2, dim=-1)
        return _turned(gradient, cos, 1, high, low), None, None


def _turned(x: Tensor, cos: Tensor, sign: int, of_second: Tensor, of_first: Tensor) -> Tensor:
    """Return `x * cos`, plus `sign` times the second half of `x` in its first half, minus that of the first."""
    first, second = x.chunk(2, dim=-1)
    # Products of 16 and 32 bits are in fp32, so `x` needs no copy.
    result = x * cos
    low, high = result.chunk(2, dim=-1)
    low.addcmul_(second, of_second, value=sign)
    high.addcmul_(first, of_first, value=-sign)
    return result.to(x.dtype)


def _apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    # The names of the arguments are those of transformers.
    cos, sin = (at_least_fp32(tensor).unsqueeze(unsqueeze_dim) for tensor in (cos, sin))
    query, key = (_Rotated.apply(x, cos, sin) for x in (q, k))  # type: ignore[no-untyped-call]
    return query, key


def _turns_halves(rotate: Callable[[Tensor], Tensor]) -> bool:
    """Return whether a function exchanges halves; that of Cohere exchanges neighbours."""
    x = torch.arange(1.0, 7.0)
    return torch.equal(rotate(x), torch.tensor([-4.0, -5.0, -6.0, 1.0, 2.0, 3.0]))


def _rotates_in_fp32(rotate: Callable[..., tuple[Tensor, Tensor]]) -> bool:
    """Return whether a function rotates queries and keys of 16 bits in fp32; that of Llama rounds each product."""
    if list(inspect.signature(rotate).parameters) != list(inspect.signature(_apply).parameters):
        return False
    x = torch.linspace(-2, 3, 256).view(1, 1, 16, 16)
    angles = torch.linspace(0, 5, 256).view(1, 16, 16)
    q, k, cos, sin = (tensor.bfloat16() for tensor in (x, x.flip(2), angles.cos(), angles.sin()))
    try:
        pairs = zip(rotate(q, k, cos, sin), _apply(q, k, cos, sin), strict=True)
    except RuntimeError:  # that of gpt-oss takes a cosine for two features
        return False
    differing = sum(int(one.ne(other).sum()) for one, other in pairs)
    return differing <= _ROUNDED_ONCE


_CHEAP: dict[str, tuple[Callable[..., Any], Callable[[Callable[..., Any]], bool]]] = {
    "rotate_half": (_RotatedHalf.apply, _turns_halves),
    "apply_rotary_pos_emb": (_apply, _rotates_in_fp32),
}
"""The functions that take the place of those of model files, and whether one has their numbers, by name."""


class CheapRotation:
    """A context in which the layers of a model rotate with these operations; the numbers are those of transformers."""

    def __init__(self, model: nn.Module) -> None:
        names = {name for module in model.modules() if (name := type(module).__module__).startswith("transformers.")}
        # Model files call the functions by their names in their module, so these names are replaced.
        self._replaced = [
            (space, name, space[name], cheap)
            for space in (vars(sys.modules[module]) for module in sorted(names))
            for name, (cheap, has_its_numbers) in _CHEAP.items()
            if name in space and has_its_numbers(space[name])
        ]

    def __enter__(self) -> None:
        for space, name, _, cheap in self._replaced:
            space[name] = cheap

    def __exit__(self, *errors: object) -> None:
        for space, name, original, _ in self._replaced:
            space[name] = original
