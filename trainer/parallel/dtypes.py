"""Where a low precision is not enough."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_fp32(tensor: Tensor) -> Tensor:
    """`tensor` in float32, or as it is where it is more precise: the type of losses, norms and softmaxes."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
