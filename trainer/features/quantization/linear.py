"""Frozen weights of linear layers in 4 or 8 bits, by the package bitsandbytes, and the products with them.

`nf4` has the 16 values of NormalFloat in blocks of 64 elements, with scales that are quantised too (Dettmers et al.
2023, arXiv:2305.14314). `nf4_single` has scales in fp32. `int8` has one scale for each output (Dettmers et al. 2022,
arXiv:2208.07339); inputs are not quantised. A product is computed with the dequantised weight, in the type of the
product.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from trainer.parallel.stored_in_parts import CODES, LinearInParts, StoredInParts

_BLOCK, _NESTED_BLOCK = 64, 256  # elements of a scale, and scales of a scale: the defaults of the package


@cache
def load_package() -> Any:
    """Return the functions of bitsandbytes.

    Raises:
        ImportError: it is not installed.
    """
    # It warns of a kernel that only its own evaluations on CPUs use.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    import bitsandbytes.functional

    package: Any = bitsandbytes.functional
    with _disable_current_modes(), torch.device("cpu"):  # it keeps the values of the first call, also those of `meta`
        package.name2qmap["dynamic"] = package.create_dynamic_map()
    return package


@cache
def _nested_values(device: torch.device) -> Tensor:
    with _disable_current_modes():
        values: Tensor = load_package().name2qmap["dynamic"].to(device)
        return values


@dataclass(frozen=True)
class Format:
    types: Mapping[str, torch.dtype]  # the names of the tensors that stand for a weight, and their types
    # a function from a weight in fp32 to these tensors, also on `meta`
    quantize: Callable[[Tensor], Mapping[str, Tensor]]
    # a function from these tensors, the shape of the weight and a type to the weight
    dequantize: Callable[[Mapping[str, Tensor], tuple[int, ...], torch.dtype], Tensor]


def _to_nf4(weight: Tensor, nested: bool) -> dict[str, Tensor]:
    codes, state = load_package().quantize_4bit(weight, blocksize=_BLOCK, compress_statistics=nested, quant_type="nf4")
    if not nested:
        return {CODES: codes, "block_scales": state.absmax}
    return {
        CODES: codes,
        "scales": state.absmax,
        "nested_scales": state.state2.absmax,
        "offset": state.offset.reshape(1),  # FSDP cannot shard a scalar
    }


def _from_nf4(parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    package, codes, scales, nested = load_package(), parts[CODES], parts.get("block_scales"), {}
    if scales is None:
        values = _nested_values(codes.device)
        of_scales = package.QuantState(
            parts["nested_scales"], code=values, blocksize=_NESTED_BLOCK, dtype=torch.float32
        )
        scales, nested = parts["scales"], {"offset": parts["offset"], "state2": of_scales}
    state = package.QuantState(
        scales, shape=torch.Size(shape), dtype=dtype, blocksize=_BLOCK, quant_type="nf4", **nested
    )
    whole: Tensor = package.dequantize_4bit(codes.view(-1, 1), state).view(shape)
    return whole


def _to_int8(weight: Tensor) -> dict[str, Tensor]:
    # The package quantises fp16, and transformers passes it the same; other values would have other codes.
    codes, scales, _ = load_package().int8_vectorwise_quant(weight.half())
    return {CODES: codes, "row_scales": scales}


def _from_int8(parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    whole: Tensor = load_package().int8_vectorwise_dequant(parts[CODES], parts["row_scales"])
    return whole.to(dtype)


FORMATS = {
    "nf4": Format(
        {CODES: torch.uint8, "scales": torch.uint8, "nested_scales": torch.float32, "offset": torch.float32},
        partial(_to_nf4, nested=True),
        _from_nf4,
    ),
    "nf4_single": Format(
        {CODES: torch.uint8, "block_scales": torch.float32}, partial(_to_nf4, nested=False), _from_nf4
    ),
    "int8": Format({CODES: torch.int8, "row_scales": torch.float32}, _to_int8, _from_int8),
}


class QuantizedWeight(StoredInParts):
    """A frozen weight `[out, in]`, held as the tensors of a format."""

    def __init__(self, weight: Tensor, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.shape = tuple(weight.shape)
        for name, part in self.encoded(weight).items():
            self.register_parameter(name, nn.Parameter(part, requires_grad=False))

    @torch.no_grad()
    def encoded(self, weight: Tensor) -> Mapping[str, Tensor]:
        return FORMATS[self.kind].quantize(weight.detach())

    @torch.no_grad()
    def rounded(self, weight: Tensor) -> Tensor:
        return FORMATS[self.kind].dequantize(self.encoded(weight), self.shape, torch.float32)

    def decoded(self, dtype: torch.dtype, parts: Mapping[str, Tensor] | None = None) -> Tensor:
        return FORMATS[self.kind].dequantize(parts or dict(self.named_parameters()), self.shape, dtype)

    def extra_repr(self) -> str:
        return f"{self.kind}, {self.shape}"


class QuantizedLinear(LinearInParts):
    """A linear layer with a quantised weight, `[..., in] -> [..., out]`."""

    def __init__(self, layer: nn.Linear, kind: str) -> None:
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.weight = QuantizedWeight(layer.weight, kind)
        self.bias = layer.bias
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        kind = x.device.type
        # Autocast does not look into `_Product`, so the type that it would choose is passed on.
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        weight = self.weight
        parts = dict(weight.named_parameters())
        product: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            x, bias, dtype, weight.kind, weight.shape, tuple(parts), *parts.values()
        )
        return product

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class _Product(torch.autograd.Function):
    """`x W^T + b`; the backward pass dequantises the weight again, so that autograd keeps the quantised one only."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        kind: str,
        shape: tuple[int, ...],
        names: tuple[str, ...],
        *parts: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(*parts)
        ctx.weight = kind, shape, names
        ctx.of_input = x.dtype
        weight = FORMATS[kind].dequantize(dict(zip(names, parts, strict=True)), shape, dtype)
        return F.linear(x.to(dtype), weight, None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        kind, shape, names = ctx.weight
        of_input = of_bias = None
        if ctx.needs_input_grad[0]:
            parts = dict(zip(names, ctx.saved_tensors, strict=True))
            weight = FORMATS[kind].dequantize(parts, shape, gradient.dtype)
            of_input = (gradient @ weight).to(ctx.of_input)
        if ctx.needs_input_grad[1]:
            of_bias = gradient.flatten(0, -2).sum(0, dtype=torch.float32)
        return of_input, of_bias, *(None for _ in range(4 + len(names)))
