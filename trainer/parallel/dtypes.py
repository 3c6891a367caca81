"""Types for numbers that need at least fp32, and for products that lose range."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.parallel.device_traits import traits_of

NARROW = torch.float16
"""The type of products with gradients of weights that need fp32."""


def at_least_fp32(tensor: Tensor) -> Tensor:
    """Return `tensor` in fp32, or unchanged in fp64: the type of losses and softmaxes."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def is_narrow(x: Tensor) -> bool:
    """Return whether products of `x` are in fp16, by autocast, and have gradients."""
    kind = x.device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == NARROW and torch.is_grad_enabled()


def product_in_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of two matrices in 16 bits, or fp32, with sums and result in fp32."""
    if computes_on_cpu(a) or a.dtype == torch.float32:
        return a.float() @ b.float()  # products of 16 bits are exact in fp32
    return torch.mm(a, b, out_dtype=torch.float32)


def computes_on_cpu(x: Tensor) -> bool:
    # The compiler cannot read a context variable.
    return x.device.type == "cpu" if torch.compiler.is_compiling() else traits_of(x.device).is_cpu
