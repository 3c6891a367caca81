"""Linear layers that multiply in fp8 (Micikevicius et al. 2022, arXiv:2209.05433).

The output and the gradient of the input are products of fp8 numbers, and the gradient of the weight is one of bf16.
Each row of an input has its own scale, so the scales do not depend on the other rows of a microbatch. Scales are powers
of two: the parts of a row on tensor ranks may differ in scale, but round alike, except for the smallest numbers. The
recipe is `rowwise_with_gw_hp` of torchao; the class of torchao is not used, because transformers imports an installed
torchao in each process.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import ScalingType, scaled_mm
from transformers.pytorch_utils import Conv1D

from trainer.base.errors import UsageError
from trainer.engine.products import IS_WIDE
from trainer.features.fp8.section import smallest
from trainer.models.families.table import layers_of
from trainer.models.forward_context import with_method
from trainer.models.place import PlacedModel
from trainer.parallel.tensor.kinds import MatrixProduct, ShardedLinear
from trainer.recipe.schema import Recipe

_OLDEST = (8, 9)
"""The compute capability of the first GPUs with products of fp8 numbers."""
_FP8 = torch.float8_e4m3fn
_SMALLEST = 1e-12  # of a row of zeros
_FACTOR = 16
"""cuBLAS takes matrices in fp8 with multiples of this many rows and columns."""


def use_fp8(built: PlacedModel, recipe: Recipe) -> None:
    """Let the wide linear layers of a model multiply in fp8, and add a note with their number.

    Raises:
        UsageError: the GPU has no such products, no layer is wide enough, or the part of a tensor rank has no multiple
            of 16 features.
    """
    _require(next(built.model.parameters()).device)
    least = smallest(recipe)
    if recipe.model.adapter is not None:
        raise UsageError(
            f"`fp8_features` is {least}, but the layers of `model.adapter` have frozen weights, which no"
            " test of fp8 has; set one of them to null"
        )
    layers = [
        (f"{layer}.{name}", module)
        for layer, part in layers_of(built.model, "`fp8_features`").items()
        for name, module in part.named_modules()
        if type(module) in (nn.Linear, Conv1D) or isinstance(module, ShardedLinear)
    ]
    chosen = [(name, module) for name, module in layers if min(_whole_shape(module)) >= least]
    if not chosen:
        widest = max((min(_whole_shape(module)) for _, module in layers), default=0)
        raise UsageError(
            f"`fp8_features` is {least}, but the widest linear layer of {type(built.model).__name__} has {widest}"
            f" inputs or outputs; set it to at most {widest}, or to null"
        )
    built.notes.append(f"{len(chosen)} of {len(layers)} linear layers multiply in fp8; the others in bf16")
    for name, module in chosen:
        _require_multiples(name, module)
        # The class changes and the object stays, so that names, hooks and placements remain valid.
        module.__class__ = _in_fp8(type(module))  # type: ignore[arg-type]  # a class is hashable


@cache
def _in_fp8(kind: type[nn.Module]) -> type[nn.Module]:
    if issubclass(kind, MatrixProduct):
        return with_method(kind, "multiply", _multiply)  # type: ignore[arg-type]  # a class is hashable
    forward = _of_transposed if issubclass(kind, Conv1D) else _of_linear
    derived = with_method(kind, "forward", forward)  # type: ignore[arg-type]
    setattr(derived, IS_WIDE, True)  # autocast's casts of its parameters are ours
    return derived


def _of_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias)


def _of_transposed(layer: Conv1D, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias, transposed=True)


def _multiply(
    layer: MatrixProduct, x: Tensor, weight: Tensor, bias: Tensor | None = None, transposed: bool = False
) -> Tensor:
    return linear(x, weight, bias, transposed)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, transposed: bool = False) -> Tensor:
    """Return `F.linear` of `x` `[..., in]` in bf16, from numbers in fp8.

    Args:
        weight: the weight `[out, in]`, or `[in, out]` if `transposed`.
        bias: the bias `[out]`, which is added in bf16.
    """
    # Autocast does not look into a function of autograd. Layouts that gather weights round them to bf16, so all do.
    x, weight = x.to(torch.bfloat16), weight.to(torch.bfloat16)
    product: Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), weight.t() if transposed else weight)  # type: ignore[no-untyped-call]
    output = product.view(*x.shape[:-1], -1)
    return output if bias is None else output + bias.to(output.dtype)


class _Product(torch.autograd.Function):
    """`x` `[rows, in]` times the transpose of a weight `[out, in]`, both in bf16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _multiplied(*_rounded(x, 1), *_rounded(weight, 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            matrix, scale = _rounded(weight.t(), None)
            of_x = _multiplied(*_rounded(gradient, 1), matrix, scale.expand(len(matrix), 1).contiguous())
        if ctx.needs_input_grad[1]:
            of_weight = gradient.t() @ x
        return of_x, of_weight


def _rounded(matrix: Tensor, dim: int | None) -> tuple[Tensor, Tensor]:
    """Return a matrix in fp8, contiguous, and the factors that scale it back: of each row (`dim` 1), or one."""
    largest = torch.finfo(_FP8).max
    top = matrix.abs().amax() if dim is None else matrix.abs().amax(dim, keepdim=True)
    # The largest power of two that keeps all numbers in the range; in fp64, so that division does not round up to it.
    scale = torch.exp2(torch.floor(torch.log2((largest / top.double().clamp(min=_SMALLEST)).float())))
    rounded = (matrix.float() * scale).clamp(-largest, largest).to(_FP8)
    return rounded.contiguous(), scale.reciprocal().reshape(-1, 1)


def _multiplied(x: Tensor, of_x: Tensor, weight: Tensor, of_weight: Tensor) -> Tensor:
    """Return the product of matrices `[rows, in]` and `[out, in]` in fp8, with factors of their rows, in bf16."""
    rows = ScalingType.RowWise
    return scaled_mm(x, weight.t(), of_x, rows, of_weight.t(), rows, output_dtype=torch.bfloat16)


def _whole_shape(module: nn.Module) -> tuple[int, ...]:
    shape: tuple[int, ...] = getattr(module, "whole_shape", None) or tuple(cast(Tensor, module.weight).shape)
    return shape


def _require(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _OLDEST:
        name = torch.cuda.get_device_name(device)
        raise UsageError(
            f"`fp8_features` is set, but {name} has no products in fp8, which need compute capability 8.9 (Ada, Hopper)"
            " or newer; set it to null"
        )


def _require_multiples(name: str, module: nn.Module) -> None:
    shape = tuple(cast(Tensor, module.weight).shape)
    if any(size % _FACTOR for size in shape):
        raise UsageError(
            f"`fp8_features` asks for fp8 in {name}, but its weight on a rank is {shape}, and fp8 needs multiples of"
            f" {_FACTOR}; use fewer tensor ranks, or set it to a number above {min(_whole_shape(module))}"
        )
