"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864) in fewer operations, with the numbers of transformers.

Transformers turns the halves of heads by slices, and autograd fills a whole tensor with zeros for each slice. Models
such as ModernBERT rotate in fp32, by two copies of queries and keys, and a tensor for each operation. The gradients of
both copies are rounded there before they are added; here, their sum is. Where Triton runs, one kernel turns queries and
keys (`fused_rotation.py`), also those of models such as Llama, which round each product.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from trainer.parallel.device_traits import planned_traits
from trainer.parallel.dtypes import at_least_fp32
from trainer.parallel.kernel_support import KERNELS, missing

_PARTS = "rotated_parts"
"""The attribute of rotated queries that were part of one tensor: that tensor, the rotated keys, and the rotation."""
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


# The names of the arguments are those of transformers.
def _apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    if (fused := _fused(q, k, cos, sin, unsqueeze_dim, rounds_products=False)) is not None:
        return fused
    cos, sin = (at_least_fp32(tensor).unsqueeze(unsqueeze_dim) for tensor in (cos, sin))
    query, key = (_Rotated.apply(x, cos, sin) for x in (q, k))  # type: ignore[no-untyped-call]
    return query, key


class _RoundingEach:
    """A function of transformers that rounds each product, by the kernel where it runs."""

    def __init__(self, original: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self._original = original

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if (fused := _fused(q, k, cos, sin, unsqueeze_dim, rounds_products=True)) is not None:
            return fused
        return self._original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)


def _fused(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, rounds_products: bool
) -> tuple[Tensor, Tensor] | None:
    """Return queries and keys that the kernel turned; None if it does not run, or does not take them."""
    if unsqueeze_dim != 1 or missing("rotation", q.device) is not None or not KERNELS["rotation"].takes(q, k, cos, sin):
        return None
    dtype = torch.promote_types(q.dtype, cos.dtype) if rounds_products else q.dtype
    query, key = KERNELS["rotation"].FusedRotation.apply(q, k, cos, sin, dtype, False, rounds_products)
    whole = q._base
    if query.requires_grad and dtype == q.dtype and _is_part(q, whole, 0) and _is_part(k, whole, _features(q)):
        setattr(query, _PARTS, (whole, key, cos, sin, rounds_products))
    return query, key


def _features(x: Tensor) -> int:
    return x.shape[1] * x.shape[3]


def _is_part(x: Tensor, whole: Tensor | None, first: int) -> bool:
    """Return whether heads `[batch, heads, sequence, size]` are the features of a tensor from the `first` on."""
    if whole is None or x._base is not whole or not whole.is_contiguous():
        return False
    features, (batch, _, length, size) = whole.shape[-1], x.shape
    strides = (length * features, size, features, 1)
    is_placed = all(one == other for one, other, n in zip(x.stride(), strides, x.shape, strict=True) if n > 1)
    starts = x.storage_offset() == whole.storage_offset() + first
    return is_placed and starts and whole.numel() == batch * length * features


def _are_all(states: tuple[Tensor, Tensor, Tensor], whole: Tensor) -> bool:
    """Return whether values lie behind the queries and keys of a tensor, with heads of their size, and at its end."""
    query, key, value = states
    first = _features(query) + _features(key)
    at_end = first + _features(value) == whole.shape[-1] and value.shape[3] == query.shape[3]
    return at_end and _is_part(value, whole, first)


def _attend(
    function: Callable[..., Any], module: Any, query: Tensor, key: Tensor, value: Tensor, *others: Any, **named: Any
) -> Any:
    """Call attention with queries, keys and values that have one gradient, if one product computed them.

    Autograd would join their gradients in a pass over memory of its own.
    """
    states = (query, key, value)
    whole, of_query, *rotation = getattr(query, _PARTS, (None, None))
    if whole is not None and of_query is key and _are_all(states, whole):
        query, key, value = KERNELS["rotation"].JoinedStates.apply(whole, *(x.detach() for x in states), *rotation)
    return function(module, query, key, value, *others, **named)


class _Joining:
    """The attention functions of transformers."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def get_interface(self, *arguments: Any) -> Callable[..., Any]:
        return partial(_attend, self._original.get_interface(*arguments))

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return partial(_attend, self._original[name])


@cache
def _cheap_half(original: Callable[[Tensor], Tensor]) -> Callable[..., Any] | None:
    """Return the exchange of halves in place of a function that exchanges them; that of Cohere does not."""
    turned = original(torch.arange(1.0, 7.0, device="cpu"))
    return _RotatedHalf.apply if turned.tolist() == [-4.0, -5.0, -6.0, 1.0, 2.0, 3.0] else None


@cache
def _cheap_application(original: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any] | None:
    """Return a function with the numbers of one of transformers in 16 bits; None if none of these has them.

    That of ModernBERT rotates in fp32, and that of Llama rounds each product.
    """
    if list(inspect.signature(original).parameters) != list(inspect.signature(_apply).parameters):
        return None
    x = torch.linspace(-2, 3, 256, device="cpu").view(1, 1, 16, 16)
    angles = torch.linspace(0, 5, 256, device="cpu").view(1, 16, 16)
    q, k, cos, sin = (tensor.bfloat16() for tensor in (x, x.flip(2), angles.cos(), angles.sin()))
    try:
        expected = torch.cat(original(q, k, cos, sin))
    except RuntimeError:  # that of gpt-oss takes a cosine for two features
        return None
    x = torch.cat((q, k))
    if torch.equal(expected, x * cos + _RotatedHalf.apply(x) * sin):  # type: ignore[no-untyped-call]
        return _RoundingEach(original)
    in_fp32 = _Rotated.apply(x, cos.float(), sin.float())  # type: ignore[no-untyped-call]
    return _apply if int(expected.ne(in_fp32).sum()) <= _ROUNDED_ONCE else None


_CHEAP: dict[str, Callable[[Any], Any]] = {
    "rotate_half": _cheap_half,
    "apply_rotary_pos_emb": _cheap_application,
    "ALL_ATTENTION_FUNCTIONS": _Joining,
}
"""By the name of an object in model files: the cheaper one with the same numbers, or None."""


class CheapRotation:
    """A context in which the layers of a model rotate with these operations; the numbers are those of transformers."""

    def __init__(self, model: nn.Module) -> None:
        names = {name for module in model.modules() if (name := type(module).__module__).startswith("transformers.")}
        with _disable_current_modes(), planned_traits(None):  # functions are tried with numbers, which a plan has not
            # Model files call the functions by their names in their module, so these names are replaced.
            self._replaced = [
                (space, name, space[name], cheap)
                for space in (vars(sys.modules[module]) for module in sorted(names))
                for name, cheap_of in _CHEAP.items()
                if name in space and (cheap := cheap_of(space[name])) is not None
            ]

    def __enter__(self) -> None:
        for space, name, _, cheap in self._replaced:
            space[name] = cheap

    def __exit__(self, *errors: object) -> None:
        for space, name, original, _ in self._replaced:
            space[name] = original
