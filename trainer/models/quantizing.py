"""Quantise the frozen linear layers of a model, and read quantised weights by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from trainer.base.distribution import install_command
from trainer.base.errors import UsageError
from trainer.models.families.table import layers_of
from trainer.models.names import replace_in, tied_names
from trainer.models.quantized_parts import quantized_in
from trainer.parallel.quantized_linear import FORMATS, Format, QuantizedLinear, load_package


def quantize_layers(model: nn.Module, kind: str) -> None:
    """Replace the frozen linear layers inside of the repeated layers; on `meta`, their weights have shapes only.

    Layers that are trained, or share their weight, keep it.

    Raises:
        UsageError: the model has no such layer, its layers are of another kind, or bitsandbytes is not installed.
    """
    _require_package(kind)
    inside = {id(part) for layer in layers_of(model, "`model.quantization`").values() for part in layer.modules()}
    tied = {name for names in tied_names(model) for name in names}
    found = 0
    for name, module in list(model.named_modules()):
        if id(module) not in inside or not isinstance(module, nn.Linear | Conv1D):
            continue
        if isinstance(module, Conv1D):
            raise UsageError(
                f"`model.quantization` is {kind}, which does not support the layers of this model: {name} is a Conv1D,"
                " which holds its weight transposed; set it to null"
            )
        if type(module) is nn.Linear and not module.weight.requires_grad and f"{name}.weight" not in tied:
            replace_in(model, name, QuantizedLinear(module, kind))
            found += 1
    if not found:
        raise UsageError(
            f"`model.quantization` is {kind}, but the repeated layers of this model have no frozen linear layer; set it"
            " to null"
        )


def _require_package(kind: str) -> None:
    try:
        load_package()
    except ImportError as error:
        raise UsageError(
            f"`model.quantization` is {kind}, which needs the package bitsandbytes; install it"
            f" ({install_command('quantization')}) or set it to null ({error})"
        ) from error


@dataclass(frozen=True)
class StoredParts:
    """The tensors that stand for a quantised weight: their names, by their names in its format."""

    format: Format
    parts: Mapping[str, str]

    def dequantized(self, shape: Sequence[int], read: Callable[[str], Tensor]) -> Tensor:
        """Return the weight in fp32, from tensors that `read` returns, also in fp32."""
        # `read` returns fp32, in which codes of 8 bits are exact.
        tensors = {part: read(name).to(self.format.types[part]) for part, name in self.parts.items()}
        return self.format.dequantize(tensors, tuple(shape), torch.float32)


def quantized_weights(names: Iterable[str]) -> dict[str, StoredParts]:
    """Return the quantised weights among tensors of a model, by the name of the weight."""
    known = {part for one in FORMATS.values() for part in one.types}
    grouped: dict[str, dict[str, str]] = {}
    for name in names:
        weight, _, part = name.rpartition(".")
        if part in known:
            grouped.setdefault(weight, {})[part] = name
    found = {}
    for weight, parts in grouped.items():
        # Formats are known by the names of their tensors; an incomplete set is no quantised weight.
        kind = next((one for one in FORMATS.values() if one.types.keys() == parts.keys()), None)
        if kind is not None:
            found[weight] = StoredParts(kind, parts)
    return found


def quantized_base(
    model: nn.Module, base: Mapping[str, Tensor], already: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Return weights by name, with those quantised that are so in `model`, which may be on `meta`.

    `already` has the tensors of weights that were quantised before.
    """
    found = dict(base)
    for name, weight in quantized_in(model).items():
        if name in found:
            whole = found.pop(name)
            parts = already.get(name) or weight.quantize(whole)
            found |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    return found
