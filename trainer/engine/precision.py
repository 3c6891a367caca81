"""Precision of the forward pass; gradients and loss are fp32 in every precision, as weights are by default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from trainer.base.errors import UsageError
from trainer.base.extensions import sole
from trainer.engine.products import rounded_by_autocast
from trainer.engine.results import StepResult
from trainer.models.place import PlacedModel
from trainer.recipe.registered import asked_for
from trainer.recipe.schema import Communication, Recipe

PrecisionName = Literal["fp32", "bf16", "fp16"]
COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class LossScaler(Protocol):
    """The factor of the loss, on the device, so that a step need not wait until the host has read the one before."""

    scale: Tensor
    largest: float  # the largest element of the scaled gradient of a step that is not skipped
    skipped_steps: int  # among those that the host has read

    def update(self, flag: Tensor) -> None:
        """Change the factor after a step, without a wait; `flag` is 1.0 if the step was bad, and else 0.0."""

    def settle(self, result: StepResult) -> StepResult:
        """Count a step that the host has read, and return its result with the number of skipped steps.

        Args:
            result: loss, norm and scale, equal on all ranks. If they are not finite, the step changed no weights.

        Raises:
            NonFiniteError: the scale falls below 1.
        """

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint, by name, after all steps are settled."""

    def load_state(self, scalars: Mapping[str, float]) -> None:
        """Restore the result of `state`."""


class NarrowPrecision(Protocol):
    """A precision with a smaller range than fp32, registered as `precision` by its name in a recipe."""

    def widen(self, model: nn.Module) -> None:
        """Let the layers of a model compute gradients of weights in fp32; the model itself keeps its `forward`."""

    def scaler(self, device: torch.device) -> LossScaler:
        """Return the factor of the loss before the first step."""


def narrow_precision(name: str) -> NarrowPrecision | None:
    """Return the registered precision of a name; None: it has the range of fp32."""
    kind: type[NarrowPrecision] | None = sole("precision", name)
    return None if kind is None else kind()


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


def cast_forward(model: nn.Module, precision: PrecisionName, device: torch.device) -> None:
    """Run the forward pass of `model` under torch's autocast: matrix products in bf16 or fp16, the rest in fp32.

    This changes the model's own forward, inside of any wrapper: DeepSpeed's engine disables an autocast around it.

    Raises:
        UsageError: the device does not support the type.
    """
    if (narrow := narrow_precision(precision)) is not None:
        narrow.widen(model)
    if precision != "fp32":
        _require(precision, device)
        for method in ("forward", "generate"):  # the latter calls an encoder by itself
            if hasattr(model, method):
                function = getattr(model, method)
                # On the object, so that other models of the class are not cast.
                setattr(model, method, partial(_autocast, function, COMPUTE_DTYPES[precision], device.type))


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
