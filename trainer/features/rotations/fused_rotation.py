"""Rotary position embeddings as one operation of torch, computed by a Triton kernel in one pass over memory.

This module imports Triton at the first launch: see `trainer.parallel.kernel_support`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.parallel import kernel_support
from trainer.parallel.launching import Launch, facts_of, launch, operation

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_ELEMENTS = 2048  # of the first halves of heads that one program turns


def takes(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether the operation takes heads `[batch, heads, sequence, size]` with these cosines and sines."""
    of_heads = all(x.dtype in _DTYPES and x.dim() == 4 and x.shape[-1] == cos.shape[-1] for x in (q, k))
    fits = cos.shape == sin.shape and cos.dim() == 3 and cos.shape[0] in (1, q.shape[0]) and cos.shape[-1] % 2 == 0
    same = q.dtype == k.dtype and q.shape[0] == k.shape[0] and q.shape[2] == k.shape[2] == cos.shape[1]
    return of_heads and fits and same and {cos.dtype, sin.dtype} <= {*_DTYPES}


@operation(
    "trainer::rotated_into",
    "(Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor(a!) q_output, Tensor(b!) k_output, bool is_inverse,"
    " bool rounds_products) -> ()",
)
def _write(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_output: Tensor, k_output: Tensor, is_inverse: bool,
    rounds_products: bool,
) -> None:  # fmt: skip
    """Write the results of `_rotated` to tensors `[batch, heads, sequence, size]`, whose heads are contiguous."""
    if q.numel() == 0 or k.numel() == 0:
        return
    outputs = (q_output, k_output)
    q, k, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, cos, sin))

    def plan() -> list[Launch]:
        half = q.shape[-1] // 2
        width, heads = _power_of_2(half), max(q.shape[1], k.shape[1])
        at_once = min(_power_of_2(heads), max(1, _MOST_ELEMENTS // width))
        of_row = (0 if x.shape[0] == 1 else x.stride(0) for x in (cos, sin))
        numbers = (q.shape[2], *of_row, cos.stride(1), sin.stride(1))
        of_heads = [(x.shape[1], *x.stride()[:3], *o.stride()[:3]) for x, o in zip((q, k), outputs, strict=True)]
        constants = {"HALF": half, "WIDTH": width, "HEADS": at_once, "INVERSE": is_inverse, "EACH": rounds_products}
        grid = (q.shape[0] * q.shape[2], -(-heads // at_once))
        options = _options(width * at_once)
        return [Launch(_kernels().rotary_kernel, grid, (*numbers, *of_heads[0], *of_heads[1]), constants | options)]

    facts = ("rotation", q.device, is_inverse, rounds_products, *facts_of(q, k, cos, sin, *outputs))
    launch(facts, [(q, k, *outputs, cos, sin)], plan)


@torch.library.register_fake("trainer::rotated_into")  # type: ignore[untyped-decorator]
def _no_result(*_: Any) -> None:
    return None


@operation(
    "trainer::rotated",
    "(Tensor q, Tensor k, Tensor cos, Tensor sin, ScalarType dtype, bool is_inverse, bool rounds_products)"
    " -> (Tensor, Tensor)",
)
def _rotated(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, is_inverse: bool, rounds_products: bool
) -> tuple[Tensor, Tensor]:
    """Return `x * cos + rotate_half(x) * sin` of queries and keys, computed in fp32.

    Args:
        q: the queries or their gradient, `[batch, heads, sequence, size]` with an even size.
        k: the keys or their gradient; they may have another number of heads.
        cos: the cosines, `[batch, sequence, size]`; one row serves all rows of a batch.
        sin: the sines, of the shape of the cosines.
        dtype: the type of the results.
        is_inverse: return the gradient of `x` from that of the result.
        rounds_products: round each product to `dtype` before the sum.

    Returns:
        The turned queries and keys, with the order of dimensions in memory that these have.
    """
    outputs: tuple[Tensor, Tensor] = _empty_results(q, k, cos, sin, dtype, is_inverse, rounds_products)
    _write(q, k, cos, sin, *outputs, is_inverse, rounds_products)
    return outputs


@torch.library.register_fake("trainer::rotated")  # type: ignore[untyped-decorator]
def _empty_results(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, is_inverse: bool, rounds_products: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, dtype=dtype), torch.empty_like(k, dtype=dtype)


class FusedRotation(torch.autograd.Function):
    """The operation with its gradient, which is its inverse on the gradient; only cosines and sines are saved."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, is_inverse: bool,
        rounds_products: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(cos, sin)
        ctx.numbers = (q.dtype, not is_inverse, rounds_products)
        outputs: tuple[Tensor, Tensor] = _rotated(q, k, cos, sin, dtype, is_inverse, rounds_products)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # A node of its own only for gradients of gradients.
        rotate = FusedRotation.apply if torch.is_grad_enabled() else _rotated
        q, k = rotate(*gradients, *ctx.saved_tensors, *ctx.numbers)  # type: ignore[no-untyped-call]
        return q, k, *[None] * 5


class JoinedStates(torch.autograd.Function):
    """Rotated queries and keys, and the values beside them, with one gradient for the tensor that has all three."""

    @staticmethod
    def forward(
        ctx: Any, whole: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, rounds_products: bool
    ) -> tuple[Tensor, ...]:
        """Return the states.

        Args:
            whole: the heads of queries, keys and values side by side, with the features in its last dimension.
            q: the rotated queries `[batch, heads, sequence, size]`.
            k: the rotated keys.
            v: the values.
            cos: the cosines of the rotation.
            sin: its sines.
            rounds_products: whether each product was rounded.
        """
        ctx.save_for_backward(cos, sin)
        ctx.shape, ctx.rounds_products = whole.shape, rounds_products
        return q.detach(), k.detach(), v.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v), (cos, sin), others = gradients, ctx.saved_tensors, [None] * 6
        if torch.is_grad_enabled():  # gradients of gradients
            q, k = FusedRotation.apply(q, k, cos, sin, v.dtype, True, ctx.rounds_products)  # type: ignore[no-untyped-call]
            return torch.cat([x.transpose(1, 2) for x in (q, k, v)], dim=2).view(ctx.shape), *others
        heads = [x.shape[1] for x in (q, k, v)]
        whole = v.new_empty(v.shape[0], v.shape[2], sum(heads), v.shape[3])
        of_q, of_k, of_v = (part.transpose(1, 2) for part in torch.split(whole, heads, dim=2))
        _write(q, k, cos, sin, of_q, of_k, True, ctx.rounds_products)
        of_v.copy_(v)
        return whole.view(ctx.shape), *others


def _kernels() -> Any:
    from trainer.features.rotations import rotary_kernels

    return rotary_kernels


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _options(elements: int) -> dict[str, Any]:
    # A fused product and sum would round once, where torch's operations round twice.
    warps = max(1, min(4, elements // 256))
    return {} if kernel_support.is_interpreted() else {"num_warps": warps, "enable_fp_fusion": False}
