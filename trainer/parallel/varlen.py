"""Attention inside of flat rows without dropout, by torch's variable-length attention.

It runs the FlashAttention that is part of torch's builds for CUDA, or a newer version that the user activates in torch.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from trainer.parallel.kernel_support import age_obstacle

_DTYPES = (torch.bfloat16, torch.float16)
_MOST_HEAD_DIM, _HEAD_DIM_FACTOR = 192, 8
"""Limits of heads; above 192, the backward pass of FlashAttention depends on the GPU."""
_PARAMETERS = inspect.signature(varlen_attn).parameters  # a look takes 20 to 40 microseconds
_HAS_WINDOW, _HAS_GROUPS = "window_size" in _PARAMETERS, "enable_gqa" in _PARAMETERS


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # a compiled graph need not follow it
def obstacle_of_device(device: torch.device) -> str | None:
    """Return the reason why no call runs on a device; None if calls run."""
    if device.type != "cuda":
        return f"the device is a {device.type}, and torch's variable-length attention needs an NVIDIA GPU"
    if (reason := age_obstacle(device)) is not None:
        return reason
    if not torch.backends.cuda.is_flash_attention_available():
        return "this torch was built without FlashAttention"
    if not _HAS_WINDOW:
        return f"the variable-length attention of torch {torch.__version__} has no window; install torch 2.11 or newer"
    return None


def obstacle(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Return the reason why `attention` does not take its arguments; None if it takes them."""
    if query.dtype not in _DTYPES:
        return f"torch's variable-length attention does not compute in {query.dtype}"
    if query.shape[1] != key.shape[1] and not _HAS_GROUPS:
        return f"heads of queries share keys, which needs torch 2.12 or newer; this is torch {torch.__version__}"
    dim = query.shape[-1]
    if dim != value.shape[-1] or dim % _HEAD_DIM_FACTOR or dim > _MOST_HEAD_DIM:
        return f"torch's variable-length attention does not take heads of {dim} and {value.shape[-1]} dimensions"
    reason: str | None = obstacle_of_device(query.device)
    return reason


def attention(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float, is_causal: bool,
    window: int | None,
) -> Tensor:  # fmt: skip
    """Compute scaled dot-product attention of each token to those of its row.

    Args:
        query: the queries `[1, heads, tokens, head_dim]` of all rows, one row after the other.
        key: the keys `[1, key_value_heads, tokens, head_dim]`, of the same type; their heads divide those of queries.
        value: the values, of the shape of the keys.
        starts: the place of the first token of each row, and the number of all tokens, int32 `[rows + 1]`.
        scale: the factor of the products of queries and keys.
        is_causal: whether a query sees no key at a later position.
        window: the largest distance of a query and a key that it sees; None: any.

    Returns:
        The output `[1, tokens, heads, head_dim]`.
    """
    query, key, value = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
    # FlashAttention takes -1 for no limit, and 0 keys on the right for a causal mask.
    before = -1 if window is None else window
    options: dict[str, Any] = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
    output = varlen_attn(
        query, key, value, starts, starts, longest, longest, scale=scale,
        window_size=(before, 0 if is_causal else before), **options,
    )  # fmt: skip
    assert isinstance(output, Tensor)
    return output.unsqueeze(0)
