"""What is computed in which type; master weights, gradients, loss and norms are fp32 in every precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

PrecisionName = Literal["fp32", "bf16", "fp16"]
COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def cast_forward(model: nn.Module, precision: PrecisionName, device: torch.device) -> None:
    """Makes `model` run its forward pass under torch's autocast: matrix products in bf16 or fp16, the rest in fp32.

    The model's own forward is changed, inside of whatever wraps it, so that every strategy computes alike; in
    particular DeepSpeed's engine, which would switch an autocast around it off.
    """
    if precision != "fp32":
        model.forward = partial(_autocast, model.forward, COMPUTE_DTYPES[precision], device.type)


def _autocast(forward: Callable[..., Any], dtype: torch.dtype, device_type: str, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(device_type, dtype=dtype):
        return forward(*args, **kwargs)
