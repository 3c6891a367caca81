"""Types for numbers that need at least fp32, and for products that lose range."""

from __future__ import annotations

import torch
from torch import Tensor

NARROW = torch.float16
"""The type of products with gradients of weights that need fp32."""


def at_least_fp32(tensor: Tensor) -> Tensor:
    """Return `tensor` in fp32, or unchanged in fp64: the type of losses and softmaxes."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def is_narrow(x: Tensor) -> bool:
    """Return whether products of `x` are in fp16, by autocast, and have gradients."""
    kind = x.device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == NARROW and torch.is_grad_enabled()
