"""Layers for fp16: gradients of weights are computed in fp32, and so are norms."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from trainer.engine.products import IS_WIDE, is_product
from trainer.features.fp16.wide_products import WideProducts, add_bias, convolution, linear, shares_input, sharing
from trainer.models.families.table import shared_product
from trainer.models.forward_context import with_method
from trainer.parallel.tensor.kinds import MatrixProduct


def _of_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias, is_shared=shares_input(layer))


def _of_transposed(layer: Conv1D, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias, transposed=True)


def _of_layer_norm(layer: nn.LayerNorm, x: Tensor) -> Tensor:
    return nn.LayerNorm.forward(layer, _for_norm(x))


def _of_group_norm(layer: nn.GroupNorm, x: Tensor) -> Tensor:
    return nn.GroupNorm.forward(layer, _for_norm(x))


def _for_norm(x: Tensor) -> Tensor:
    """Return the input of a norm in fp32, as autocast does on GPUs; on CPUs, gradients of weights would overflow."""
    return x.float() if x.dtype == torch.float16 else x


_WIDE = {
    nn.Linear: with_method(nn.Linear, "forward", _of_linear),
    Conv1D: with_method(Conv1D, "forward", _of_transposed),
    nn.Conv1d: with_method(nn.Conv1d, "forward", convolution),
    nn.Conv2d: with_method(nn.Conv2d, "forward", convolution),
}
"""Classes with gradients of weights in fp32, by the class that they replace."""
_NORMS = {
    nn.LayerNorm: with_method(nn.LayerNorm, "forward", _of_layer_norm),
    nn.GroupNorm: with_method(nn.GroupNorm, "forward", _of_group_norm),
}
for _kind in _WIDE.values():
    setattr(_kind, IS_WIDE, True)


def _multiply(
    layer: MatrixProduct, x: Tensor, weight: Tensor, bias: Tensor | None = None, transposed: bool = False
) -> Tensor:
    return linear(x, weight, bias, transposed, shares_input(layer))


def _add_bias(layer: MatrixProduct, x: Tensor, bias: Tensor) -> Tensor:
    return add_bias(x, bias)


def _wide(kind: type[MatrixProduct]) -> type[nn.Module]:
    """Return a class of this project's products with gradients of weights in fp32."""
    multiplying = with_method(kind, "multiply", _multiply)  # type: ignore[arg-type]
    return with_method(multiplying, "add_bias", _add_bias)  # type: ignore[arg-type]


@cache
def _sharing(kind: type[nn.Module], name: str) -> type[nn.Module]:
    """Return a class with a method `name` whose linear layers work on a tensor that all rows share."""
    method = getattr(kind, name)

    @wraps(method)
    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with sharing(module.children()):
            return method(module, *args, **kwargs)

    return with_method(kind, name, run)  # type: ignore[arg-type]


@cache
def _with_wide_products(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class whose forward pass calls `linear` in place of torch's function, such as a router of experts."""
    own = kind.forward

    @wraps(own)
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # The compiler does not trace the mode.
        with nullcontext() if torch.compiler.is_compiling() else WideProducts():
            return own(module, *args, **kwargs)

    return with_method(kind, "forward", forward)  # type: ignore[arg-type]


def _multiplies_itself(module: nn.Module) -> bool:
    """Return whether a module has a trained matrix and may multiply by it in its own code."""
    is_known = is_product(type(module)) or isinstance(module, nn.Embedding)
    return not is_known and any(p.requires_grad and p.dim() > 1 for p in module.parameters(recurse=False))


def use_wide_products(model: nn.Module) -> None:
    """Give the layers of a model classes with gradients of weights in fp32; `forward` of the model stays."""
    for name, module in model.named_modules():
        if _multiplies_itself(module):
            # The class changes and the object stays, so hooks, names and references to the module remain valid.
            module.__class__ = _with_wide_products(type(module))  # type: ignore[arg-type]
        module.__class__ = (_WIDE | _NORMS).get(type(module), type(module))
        if isinstance(module, MatrixProduct):
            module.__class__ = _wide(type(module))  # type: ignore[assignment]
        # Last, so that the shared method wraps the class that was chosen above.
        if (shared := shared_product(model, name)) is not None:
            module.__class__ = _sharing(type(module), shared)  # type: ignore[arg-type]  # a class is hashable
