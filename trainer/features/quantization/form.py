"""Frozen linear layers in 4 or 8 bits: their layers, and their weights in checkpoints and in files of other tools."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from trainer.base.distribution import install_command
from trainer.base.errors import UsageError
from trainer.features.quantization.experts import QuantizedExperts, decoded_experts
from trainer.features.quantization.files import QuantizedFiles, quantized_keys
from trainer.features.quantization.linear import FORMATS, Format, QuantizedLinear, load_package
from trainer.features.quantization.section import QuantizationKeys
from trainer.models.families.table import FAMILIES, layers_of
from trainer.models.merged_weights import is_fused
from trainer.models.names import replace_in, tied_names
from trainer.models.registered_forms import unreadable
from trainer.models.stored_weights import StoredWeights
from trainer.models.weight_form import EncodedWeight, PartsByName, WeightForm
from trainer.parallel.stored_in_parts import weights_in_parts
from trainer.parallel.tensor.low_rank import attach, product_of
from trainer.recipe.schema import Model


@dataclass(frozen=True)
class StoredParts(EncodedWeight):
    format: Format

    def decoded(self, shape: Sequence[int], read: Callable[[str], Tensor]) -> Tensor:
        # `read` returns fp32, in which codes of 8 bits are exact.
        tensors = {part: read(name).to(self.format.types[part]) for part, name in self.parts.items()}
        decoded = partial(decoded_experts, self.format) if len(shape) == 3 else self.format.dequantize
        return decoded(tensors, tuple(shape), torch.float32)


class Quantization(WeightForm):
    """The form of `model.quantization`."""

    def replace_layers(self, model: nn.Module) -> None:
        """Quantise frozen linear layers and experts of the repeated layers; on `meta`, their weights have shapes only.

        Layers that are trained, or share their weight, keep it.

        Raises:
            UsageError: the model has no such layer, its layers are of another kind, or bitsandbytes is not installed.
        """
        kind = str(self.value)
        _require_package(kind)
        inside = {id(part) for layer in layers_of(model, "`model.quantization`").values() for part in layer.modules()}
        tied = {name for names in tied_names(model) for name in names}
        num_replaced = 0
        # The functions of transformers know matrices of experts as one tensor only.
        family = FAMILIES.get(cast(Any, model).config.model_type)
        computes_experts = family is not None and family.change is not None
        for name, module in list(model.named_modules()):
            if id(module) not in inside or not (isinstance(module, nn.Linear | Conv1D) or is_fused(module)):
                continue
            if isinstance(module, Conv1D):
                raise UsageError(
                    f"`model.quantization` is {kind}, which does not support the layers of this model: {name} is a"
                    " Conv1D, which holds its weight transposed; set it to null"
                )
            if is_fused(module) and computes_experts:
                for key, matrix in list(module.named_parameters(recurse=False)):
                    if matrix.dim() == 3 and not matrix.requires_grad:
                        delattr(module, key)  # a module cannot take the place of a parameter
                        setattr(module, key, QuantizedExperts(matrix, kind))
            if type(module) is nn.Linear and not module.weight.requires_grad and f"{name}.weight" not in tied:
                layer = QuantizedLinear(module, kind)
                replace_in(model, name, layer)
                # The product is a child of the layer that was replaced.
                if (product := product_of(module)) is not None:
                    attach(layer, product)
                num_replaced += 1
        if not num_replaced:
            raise UsageError(
                f"`model.quantization` is {kind}, but the repeated layers of this model have no frozen linear layer;"
                " set it to null"
            )

    def encoded(self, model: nn.Module, weights: Mapping[str, Tensor], already: PartsByName) -> dict[str, Tensor]:
        tensors = dict(weights)
        for name, weight in weights_in_parts(model).items():
            if name in tensors:
                whole = tensors.pop(name)
                parts = already.get(name) or weight.encoded(whole)
                tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        return tensors

    def peft_config(self, plain: nn.Module, model: nn.Module) -> Mapping[str, Any]:
        if self.value == "int8":
            raise UsageError(
                "`--verify` with `--adapter` compares logits of PEFT, but over `model.quantization` int8 other programs"
                " round the inputs of layers too; leave one of them out"
            )
        if experts := next((name for name, weight in weights_in_parts(model).items() if len(weight.shape) == 3), None):
            raise UsageError(
                "`--verify` with `--adapter` compares logits of PEFT, but other programs hold experts exactly, and"
                f" `model.quantization` {self.value} holds {experts} in 4 bits; leave one of them out"
            )
        layers = {name for name, module in plain.named_modules() if isinstance(module, nn.Linear)}
        # PEFT must leave exact the layers that the training left exact.
        exact = layers - {name.rpartition(".")[0] for name in weights_in_parts(model)}
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": self.value == "nf4",
            "llm_int8_skip_modules": sorted(exact),
        }

    def stored_in(self, keys: Collection[str]) -> Collection[str]:
        return quantized_keys(keys)

    def opened(
        self,
        recipe: Model,
        stored: StoredWeights,
        model: nn.Module,
        renamed: Mapping[str, str],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> StoredWeights:
        quantized = quantized_keys(stored.shapes)
        # bitsandbytes leaves experts exact, which are quantised as those of other files.
        linear = [name for name, weight in weights_in_parts(model).items() if len(weight.shape) == 2]
        if exact := [name for name in linear if renamed.get(name) not in quantized]:
            raise UsageError(
                f"`model.name_or_path` is {str(recipe.name_or_path)!r}, with weights in {self.value}, but holds"
                f" {exact[0]} exactly; quantise all linear layers of its repeated layers, or name the model that it was"
                " made of"
            )
        return QuantizedFiles(stored, {key: shape for key, shape in shapes.items() if key in quantized})

    @staticmethod
    def reads(recipe: Model, place: str, described: Mapping[str, Any]) -> bool:
        if described.get("quant_method") != "bitsandbytes":
            return False
        form, keys = _format_of(described), cast(QuantizationKeys, recipe)
        if form is None:
            kind = f", {described.get('bnb_4bit_quant_type')}" if described.get("load_in_4bit") else ""
            raise unreadable(place, f"bitsandbytes{kind}")
        if keys.quantization != form:
            raise UsageError(
                f"`model.quantization` must be {form}, the format of the weights in {str(recipe.name_or_path)!r}, but"
                f" is {keys.quantization or 'null'}; set it, and `model.adapter`"
            )
        if recipe.adapter is not None and recipe.adapter.start == "loftq":
            raise UsageError(
                '`model.adapter.start` is "loftq", which needs the weights before their quantisation, but'
                f" {str(recipe.name_or_path)!r} holds them in {form}; set it to null"
            )
        return True

    @staticmethod
    def weights_in(names: Iterable[str]) -> Mapping[str, EncodedWeight]:
        known = {part for layout in FORMATS.values() for part in layout.types}
        grouped: dict[str, dict[str, str]] = {}
        for name in names:
            weight, _, part = name.rpartition(".")
            if part in known:
                grouped.setdefault(weight, {})[part] = name
        # Formats are known by the names of their tensors; an incomplete set is no quantised weight.
        return {
            weight: StoredParts(parts, layout)
            for weight, parts in grouped.items()
            for layout in FORMATS.values()
            if layout.types.keys() == parts.keys()
        }


def _require_package(kind: str) -> None:
    try:
        load_package()
    except ImportError as error:
        raise UsageError(
            f"`model.quantization` is {kind}, which needs the package bitsandbytes; install it"
            f" ({install_command('quantization')}) or set it to null ({error})"
        ) from error


def _format_of(described: Mapping[str, Any]) -> str | None:
    """Return the format of files that bitsandbytes has quantised; None for others, such as FP4."""
    if described.get("load_in_8bit"):
        return "int8"
    if not described.get("load_in_4bit") or described.get("bnb_4bit_quant_type") != "nf4":
        return None
    if described.get("bnb_4bit_quant_storage", "uint8") != "uint8":
        return None
    return "nf4" if described.get("bnb_4bit_use_double_quant") else "nf4_single"
