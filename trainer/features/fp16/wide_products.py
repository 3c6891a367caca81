"""Matrix products and convolutions in fp16 with gradients of weights in fp32.

The gradient of a weight is a sum over all rows of a microbatch. In fp16, this sum can overflow where the sums of
smaller microbatches do not, so the microbatch size would decide which steps are skipped. Outside of autocast in fp16,
the functions are those of torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from trainer.parallel.dtypes import NARROW, computes_on_cpu, is_narrow, product_in_fp32

_SHARES = "shares_input"


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, transposed: bool = False, is_shared: bool = False
) -> Tensor:
    """Return `F.linear` of `x` `[..., in]`.

    Args:
        weight: the weight `[out, in]`, or `[in, out]` if `transposed`.
        is_shared: whether all rows use the output. Its gradient is then a sum over rows too, so it is in fp32.
    """
    if not is_narrow(x):
        return F.linear(x, weight.t() if transposed else weight, bias)
    dtype = torch.float32 if is_shared else NARROW
    with torch.autocast(x.device.type, enabled=False) if is_shared else nullcontext():
        return cast(Tensor, _Linear.apply(x, weight, bias, transposed, dtype))  # type: ignore[no-untyped-call]


class WideProducts(TorchFunctionMode):
    """Calls `linear` in place of `torch.nn.functional.linear` inside of this context."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.linear:
            return _as_linear(*args, **kwargs)
        return function(*args, **kwargs)


def _as_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear(input, weight, bias)


def shares_input(layer: nn.Module) -> bool:
    """Return whether the layer works on a tensor that all rows share; see `sharing`."""
    return getattr(layer, _SHARES, False)


@contextmanager
def sharing(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Let linear layers work on a tensor that all rows share inside of this context."""
    layers = list(layers)
    for layer in layers:
        setattr(layer, _SHARES, True)
    try:
        yield
    finally:
        for layer in layers:
            setattr(layer, _SHARES, False)


def add_bias(x: Tensor, bias: Tensor) -> Tensor:
    """Return the sum of products `x` `[..., out]` and a bias `[out]`, in the type of the products."""
    if x.dtype != NARROW:
        return x + bias.to(x.dtype)
    return cast(Tensor, _AddedBias.apply(x, bias))  # type: ignore[no-untyped-call]


def convolution(layer: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    """Return the output of a convolution."""
    if not is_narrow(x):
        return cast(Tensor, layer._conv_forward(x, layer.weight, layer.bias))
    num_dims = len(layer.stride)
    if x.dim() == num_dims + 1:
        return convolution(layer, x.unsqueeze(0)).squeeze(0)
    padding = layer.padding
    # `torch.convolution` takes zeros and numbers only, so any other padding is added before.
    if isinstance(padding, str) or layer.padding_mode != "zeros":
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x, padding = F.pad(x, layer._reversed_padding_repeated_twice, mode), (0,) * num_dims
    options = (layer.stride, padding, layer.dilation, False, (0,) * num_dims, layer.groups)
    return cast(Tensor, _Convolution.apply(x, layer.weight, layer.bias, options))  # type: ignore[no-untyped-call]


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, dtype: torch.dtype
    ) -> Tensor:
        rounded, matrix = x.to(NARROW).to(dtype), weight.to(NARROW).to(dtype)
        # The weight itself: stages of ZeRO and FSDP free its memory until the backward pass.
        ctx.save_for_backward(rounded if ctx.needs_input_grad[1] else None, weight)
        ctx.transposed = transposed
        return F.linear(rounded, matrix.t() if transposed else matrix, None if bias is None else bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            matrix = weight.to(NARROW).to(gradient.dtype)
            of_x = gradient @ (matrix.t() if ctx.transposed else matrix)
        rows = _rows(gradient)
        if ctx.needs_input_grad[1]:
            # The gradient has the shape of the weight.
            first, second = (_rows(x), rows) if ctx.transposed else (rows, _rows(x))
            of_weight = product_in_fp32(first.t(), second)
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0, dtype=torch.float32)
        return of_x, of_weight, of_bias, None, None


class _AddedBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, _rows(gradient).sum(0, dtype=torch.float32) if ctx.needs_input_grad[1] else None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, options: tuple[Any, ...]) -> Tensor:
        rounded = x.to(NARROW)
        ctx.save_for_backward(rounded, weight)
        ctx.options = options
        return torch.convolution(rounded, weight.to(NARROW), None if bias is None else bias.to(NARROW), *options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        backward = torch.ops.aten.convolution_backward
        of_x = of_weight = of_bias = None
        if needs_x:
            of_x = backward(gradient, x, weight.to(NARROW), None, *ctx.options, [True, False, False])[0]
        if needs_weight:
            with nullcontext() if computes_on_cpu(x) else _tf32_in_convolutions():
                # In fp32, products of fp16 are exact and their sum does not overflow.
                exact = gradient.float(), x.float(), weight.float()
                of_weight = backward(*exact, None, *ctx.options, [False, True, False])[1]
        if needs_bias:
            of_bias = gradient.transpose(0, 1).flatten(1).sum(1, dtype=torch.float32)
        return of_x, of_weight, of_bias, None


@contextmanager
def _tf32_in_convolutions() -> Iterator[None]:
    """Allow TF32, which holds each number of fp16, so that products are exact and fast."""
    if torch.compiler.is_compiling():  # a compiled graph keeps the setting of the process
        yield
        return
    cudnn = torch.backends.cudnn
    before, cudnn.allow_tf32 = cudnn.allow_tf32, True
    try:
        yield
    finally:
        cudnn.allow_tf32 = before
