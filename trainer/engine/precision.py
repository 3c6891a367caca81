"""Precision of the forward pass; gradients and loss are fp32 in every precision, as weights are by default."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial, wraps
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from trainer.base.errors import UsageError
from trainer.models.families.table import shared_product
from trainer.models.forward_context import with_method
from trainer.models.place import PlacedModel
from trainer.parallel.tensor.kinds import MatrixProduct
from trainer.parallel.wide_products import WideProducts, convolution, linear, shares_input, sharing
from trainer.recipe.registered import asked_for
from trainer.recipe.schema import Communication, Recipe

PrecisionName = Literal["fp32", "bf16", "fp16"]
COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


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
_PRODUCTS = {*_WIDE, *_WIDE.values()}
"""Torch's modules of matrix products. Autocast rounds all their parameters; a subclass may use them in other ways."""


def sent_dtype(communication: Communication) -> torch.dtype | None:
    """Return the type in which gradients are summed over ranks; None: their own, fp32."""
    return COMPUTE_DTYPES.get(communication.gradients)


def set_precision(tf32: bool, device: torch.device) -> None:
    """Set the precision of matrix products and convolutions of the process.

    TF32 in fp32 products is allowed or forbidden; torch allows it in convolutions by default. Parts of sums of bf16 and
    fp16 products are added in fp32; torch by default lets cuBLAS round them.

    Raises:
        UsageError: TF32 is requested on a device without it.
    """
    if tf32 and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        raise UsageError(
            f"`tf32` is true, but {name} has no TF32; set it to false, or use an NVIDIA GPU from the"
            " Ampere generation on"
        )
    products = torch.backends.cuda.matmul
    products.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    products.allow_bf16_reduced_precision_reduction = products.allow_fp16_reduced_precision_reduction = False
    products.allow_fp16_accumulation = False


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


def _is_product(kind: type[nn.Module]) -> bool:
    return kind in _PRODUCTS or issubclass(kind, MatrixProduct)


def _multiplies_itself(module: nn.Module) -> bool:
    """Return whether a module has a trained matrix and may multiply by it in its own code."""
    is_known = _is_product(type(module)) or isinstance(module, nn.Embedding)
    return not is_known and any(p.requires_grad and p.dim() > 1 for p in module.parameters(recurse=False))


def cast_forward(model: nn.Module, precision: PrecisionName, device: torch.device) -> None:
    """Run the forward pass of `model` under torch's autocast: matrix products in bf16 or fp16, the rest in fp32.

    In fp16, gradients of weights are computed in fp32. This changes the model's own forward, inside of any wrapper:
    DeepSpeed's engine disables an autocast around it.

    Raises:
        UsageError: the device does not support the type.
    """
    if precision == "fp16":
        for name, module in model.named_modules():
            if _multiplies_itself(module):
                # The class changes and the object stays, so hooks, names and references to the module remain valid.
                module.__class__ = _with_wide_products(type(module))  # type: ignore[arg-type]
            module.__class__ = (_WIDE | _NORMS).get(type(module), type(module))
            # Last, so that the shared method wraps the class that was chosen above.
            if (shared := shared_product(model, name)) is not None:
                module.__class__ = _sharing(type(module), shared)  # type: ignore[arg-type]  # a class is hashable
    if precision != "fp32":
        _require(precision, device)
        for method in ("forward", "generate"):  # the latter calls an encoder by itself
            if hasattr(model, method):
                function = getattr(model, method)
                # On the object, so that other models of the class are not cast.
                setattr(model, method, partial(_autocast, function, COMPUTE_DTYPES[precision], device.type))


def rounded_by_autocast(model: nn.Module) -> set[str]:
    """Return the names of the parameters that autocast rounds before each use: those of matrix products only.

    Ranks may gather them in the type of the products, which changes no result. Tied embeddings and norms, which compute
    in fp32, are not among them.
    """
    # A tied weight has several users, and it is rounded only if all of them are products.
    users: dict[Tensor, set[type[nn.Module]]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(parameter, set()).add(type(module))
    return {name for name, parameter in model.named_parameters() if all(map(_is_product, users[parameter]))}


def products(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, module) for name, module in model.named_modules() if _is_product(type(module)))


def plain_products(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that use their input in one matrix product only: those of one process without adapters."""
    for _, module in products(model):
        # Exact types: a subclass, or a layer with adapters inside, may read its input more than once.
        if type(module) in (nn.Linear, Conv1D) and not any(module.children()):
            yield module


def store_in_bf16(built: PlacedModel) -> None:
    """Round the trained weights of matrix products to bf16, in place; their gradients are fp32.

    Tied weights, embeddings and norms compute in fp32 and stay so, on stages of a pipeline too. Frozen weights stay as
    their checkpoint has them.
    """
    tied = {name for name, placement in built.placements.items() if placement.stages}
    rounded = rounded_by_autocast(built.model) - tied
    for name, parameter in built.model.named_parameters():
        if name in rounded and parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
            # Without it, autograd would cast gradients to bf16 before it adds those of several microbatches.
            parameter.grad_dtype = torch.float32


def store_frozen(built: PlacedModel, precision: PrecisionName) -> None:
    """Round the frozen weights of matrix products to the type of the products, in place.

    Autocast rounds them before each product anyway, so this changes no result. They can be read again, for the export
    and the digest of a checkpoint. Tied weights, embeddings, norms and biases stay in fp32.
    """
    if precision == "fp32" or built.origin is None:
        return
    rounded = rounded_by_autocast(built.model).intersection(built.origin.names)
    shared = {name for name, placement in built.placements.items() if placement.stages}
    for name, parameter in built.model.named_parameters():
        if name in rounded - shared and not parameter.requires_grad and parameter.dim() > 1:
            parameter.data = parameter.data.to(COMPUTE_DTYPES[precision])
            if built.shards is not None:
                # Parameters on `meta` have their values here.
                built.shards[name] = built.shards[name].to(COMPUTE_DTYPES[precision])


def is_stored_rounded(parameter: Tensor) -> bool:
    """Return whether `store_frozen` rounded a parameter."""
    return not parameter.requires_grad and parameter.dtype in COMPUTE_DTYPES.values()


def stored_in_bf16(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that `store_in_bf16` rounded, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad and p.dtype == torch.bfloat16}


def weights_dtype(recipe: Recipe) -> torch.dtype:
    """Return the type of the trained weights of matrix products."""
    types = {update.weights_dtype for update in asked_for("update", recipe)}
    return torch.bfloat16 if torch.bfloat16 in types else torch.float32


def _require(precision: PrecisionName, device: torch.device) -> None:
    able = torch.amp.autocast_mode.is_autocast_available(device.type)
    if device.type == "cuda" and precision == "bf16":
        # Without this argument, torch also accepts GPUs that emulate bf16.
        able = torch.cuda.is_bf16_supported(including_emulation=False)
    if not able:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        other = "fp16 or fp32" if device.type == "cuda" else "fp32"
        raise UsageError(f"`precision` is {precision}, which {name} does not compute in; use {other}")


def _autocast(forward: Callable[..., Any], dtype: torch.dtype, device_type: str, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(device_type, dtype=dtype):
        return forward(*args, **kwargs)
