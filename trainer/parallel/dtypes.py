"""Types for numbers that need at least fp32."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_fp32(tensor: Tensor) -> Tensor:
    """Return `tensor` in fp32, or unchanged in fp64: the type of losses and softmaxes."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
