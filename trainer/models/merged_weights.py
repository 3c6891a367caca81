"""The weights of a trained model with its adapter merged, from the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from trainer.models.names import owner_of, parts_of_layers
from trainer.models.registered_forms import encoded_weights
from trainer.parallel.tensor.kinds import ATTRIBUTE, ROWS
from trainer.recipe.schema import Adapter


class MergedWeights:
    """The weights of a model with its products added to the weights that they adapt.

    Args:
        model: the model without products, on `meta`.
        shapes: the shapes of all tensors, by name; those of products included.
    """

    def __init__(self, model: nn.Module, shapes: Mapping[str, Sequence[int]], adapter: Adapter | None) -> None:
        self._model = model
        self._adapter = adapter
        self._products = parts_of_products(shapes)
        self._rows = {f"{layer}.weight": parts for layer, parts in parts_of_layers(shapes, ROWS).items()}
        self._encoded = encoded_weights(shapes)
        stored = [weight.parts for weight in self._encoded.values()]
        inside = {
            part for parts in (*stored, *self._products.values(), *self._rows.values()) for part in parts.values()
        }
        self.shapes: dict[str, Sequence[int]] = {name: shape for name, shape in shapes.items() if name not in inside}
        for name in self._encoded:
            self.shapes[name] = tuple(model.get_parameter(name).shape)

    def sources(self, name: str) -> tuple[str, ...]:
        """Return the names of the tensors from which a weight is made: its own, and those of its adapter."""
        stored = tuple(self._encoded[name].parts.values()) if name in self._encoded else (name,)
        return (*stored, *self._products.get(name, {}).values(), *self._rows.get(name, {}).values())

    def merged(self, name: str, read: Callable[[str], Tensor]) -> Tensor:
        """Return a weight, from tensors that `read` returns by their names."""
        if name in self._encoded:
            weight = self._encoded[name].decoded(self.shapes[name], read)
        else:
            weight = read(name)
        if self._adapter is not None and name in self._products:
            # Products of 16-bit factors are computed in fp32, and the sum is rounded once, at the end.
            product = {factor: read(source).float() for factor, source in self._products[name].items()}
            owner = self._model.get_submodule(owner_of(name))
            is_transposed = isinstance(owner, Conv1D) or (is_fused(owner) and bool(owner.is_transposed))
            scaling = self._adapter.scaling_of(name.removesuffix(".weight"))
            merged = _merged(weight.mT if is_transposed else weight, product, scaling)
            weight = (merged.mT if is_transposed else merged).to(weight.dtype)
        if "rows" in self._rows.get(name, {}):
            # Trained rows replace those of the weight. After the product, because they do not go through it.
            ids, rows = (read(self._rows[name][part]) for part in ("ids", "rows"))
            weight = weight.index_copy(0, ids.to(torch.int64), rows.to(weight.dtype))
        return weight


def is_fused(module: nn.Module) -> bool:
    """Return whether a module has fused experts of transformers; `is_transposed` says whether they are `[in, out]`."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def parts_of_products(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the tensors of low-rank products: by the weight that each adapts, the name of each.

    The product of a layer adapts its `weight`. Another parameter of a module has a product `MODULE.lora.PARAMETER`.
    """
    weights: dict[str, dict[str, str]] = {}
    for module, parts in parts_of_layers(names, ATTRIBUTE).items():
        for part, name in parts.items():
            parameter, _, factor = part.rpartition(".")
            weight, factor = ("weight", part) if factor not in ("A", "B") else (parameter or "weight", factor)
            weights.setdefault(f"{module}.{weight}", {})[factor] = name
    return weights


def _merged(weight: Tensor, product: Mapping[str, Tensor], scaling: float) -> Tensor:
    """Return a weight `[..., out, in]` with a product added."""
    added = product["B"] @ product["A"]
    if "start_A" in product:
        # PiSSA: only the change of the product since its start is added to the weight.
        added -= product["start_B"] @ product["start_A"]
    merged = weight.float() + scaling * added
    if "magnitude.weight" in product:
        # DoRA scales each row of the sum to its learned norm.
        merged *= (product["magnitude.weight"] / torch.linalg.vector_norm(merged, dim=1)).unsqueeze(1)
    return merged
