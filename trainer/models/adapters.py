"""Frozen parameters and LoRA adapters of a Hugging Face model, by names and patterns of its modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from trainer.base.errors import Problems, UsageError
from trainer.base.text import listed
from trainer.models.families.table import layers_of
from trainer.models.names import prefixes, tied_names
from trainer.models.quantizing import quantize_layers, quantized_weights
from trainer.parallel.tensor.low_rank import ATTRIBUTE, LowRank, attach, drawn_factor
from trainer.recipe.schema import Adapter, Model

_LANGUAGE_HEADS = ("ForMaskedLM", "ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


def adapt(model: nn.Module, recipe: Model, seed: int, drawn: Collection[str] = ()) -> None:
    """Freeze parameters and add adapters, as the recipe's `model` asks; the same for a model on `meta`.

    Args:
        model: the whole model of transformers, before dropout is keyed and before it is cut.
        seed: the seed of the adapters' weights.
        drawn: the parameters with random weights in a pretrained model. An adapter trains them whole by default.

    Raises:
        UsageError: a pattern matches nothing, a target is no linear layer, or no parameter is left to train.
    """
    if recipe.freeze is not None:
        frozen = _matched_parameters(model, recipe.freeze, "model.freeze")
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in frozen:
                parameter.requires_grad_(False)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise UsageError(
                f"`model.freeze` must leave a parameter to train, but {listed(recipe.freeze, 3)} match all; remove a"
                " pattern"
            )
    if recipe.adapter is not None:
        _add_products(model, recipe, recipe.adapter, seed, drawn)


def _add_products(model: nn.Module, recipe: Model, adapter: Adapter, seed: int, drawn: Collection[str]) -> None:
    targets = _targets(model, adapter)
    if adapter.modules_to_save is None:
        saved = head_parameters(model) | set(drawn)
    else:
        saved = _matched_parameters(model, adapter.modules_to_save, "model.adapter.modules_to_save")
    model.requires_grad_(False)
    for name in saved:
        model.get_parameter(name).requires_grad_(True)
    products = {name: _product(name, layer, adapter, seed) for name, layer in targets.items()}
    if recipe.quantization is not None:
        quantize_layers(model, recipe.quantization)
    for name, product in products.items():
        attach(model.get_submodule(name), product)


def _product(name: str, layer: Any, adapter: Adapter, seed: int) -> LowRank:
    # Attributes, because DeepSpeed may have partitioned the weight.
    sizes = ("nx", "nf") if isinstance(layer, Conv1D) else ("in_features", "out_features")
    in_features, out_features = (getattr(layer, size) for size in sizes)

    def factor(which: str, shape: tuple[int, ...]) -> Tensor:
        if layer.weight.is_meta:
            return torch.empty(shape, device="meta")
        return drawn_factor(f"{name}.{ATTRIBUTE}.{which}", shape, seed)

    return LowRank(
        factor("A", (adapter.rank, in_features)),
        factor("B", (out_features, adapter.rank)),
        adapter.alpha / adapter.rank,
        nn.Dropout(adapter.dropout),
    ).train(layer.training)


def factor_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the factors of all products, by the names of the parameters."""
    return {
        f"{name}.{factor}": tuple(parameter.shape)
        for name, module in model.named_modules()
        if isinstance(module, LowRank)
        for factor, parameter in module.named_parameters()
    }


def head_parameters(model: Any) -> set[str]:
    """Return the parameters outside of the base model; none for the head of a language model, which is no fresh one."""
    if any(mark in type(model).__name__ for mark in _LANGUAGE_HEADS) or model.base_model is model:
        return set()
    base = {id(parameter) for parameter in model.base_model.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) not in base}


def _targets(model: Any, adapter: Adapter) -> dict[str, nn.Module]:
    """Return the layers with a product, by name."""
    modules = dict(model.named_modules())
    if adapter.targets is None:
        layers = set(layers_of(model).values())
        inside = {id(part) for layer in layers for part in layer.modules()}
        return {name: m for name, m in modules.items() if id(m) in inside and _is_linear(m)}
    linear = [name for name, module in modules.items() if _is_linear(module)]
    found: dict[str, nn.Module] = {}
    tied = {name.rpartition(".")[0] for names in tied_names(model) for name in names}
    problems = Problems()
    for pattern in adapter.targets:
        with problems.collect():
            names = [name for name in modules if name and _names(pattern, name)]
            if not names:
                raise _nothing("model.adapter.targets", pattern, linear)
            for name in names:
                if not _is_linear(modules[name]):
                    raise UsageError(
                        f"`model.adapter.targets` must name linear layers, but {pattern!r} matches {name}, which is a"
                        f" {type(modules[name]).__name__}; use names such as {listed(_last_parts(linear), 3)}"
                    )
                if name in tied:
                    raise UsageError(
                        f"`model.adapter.targets` must name layers with weights of their own, but the weight of {name}"
                        f" is tied to another module; remove {pattern!r}"
                    )
                found[name] = modules[name]
    problems.raise_all()
    return found


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or isinstance(module, Conv1D)


def _names(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a name or its last parts, as `target_modules` of PEFT."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _matched_parameters(model: nn.Module, patterns: Sequence[str], key: str) -> set[str]:
    """Return the parameters that a pattern matches, or in modules that it matches."""
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found: set[str] = set()
    problems = Problems()
    for pattern in patterns:
        names = {name for name in parameters if any(_names(pattern, part) for part in prefixes(name))}
        with problems.collect():
            if not names:
                raise _nothing(key, pattern, [part for name in parameters for part in prefixes(name)])
        found |= names
    problems.raise_all()
    return found


def _last_parts(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names if not name.rpartition(".")[2].isdigit()))


def _nothing(key: str, pattern: str, names: Sequence[str]) -> UsageError:
    known = _last_parts(names)
    last = pattern.rpartition(".")[2]
    near = get_close_matches(last, known, n=3, cutoff=0.5) or known
    return UsageError(
        f"`{key}` must match modules of the model, but {pattern!r} matches none; use names such as {listed(near, 6)}"
    )


class MergedWeights:
    """The weights of a model with its products added to the weights that they adapt.

    Args:
        model: the model without products, on `meta`.
        shapes: the shapes of all tensors, by name; those of the factors of products included.
        scaling: alpha / rank.
    """

    def __init__(self, model: nn.Module, shapes: Mapping[str, Sequence[int]], scaling: float) -> None:
        end = f".{ATTRIBUTE}.A"
        self._model = model
        self._scaling = scaling
        self._adapted = {f"{name.removesuffix(end)}.weight" for name in shapes if name.endswith(end)}
        self._quantized = quantized_weights(shapes)
        factors = {factor for name in self._adapted for factor in _factors(name)}
        parts = {part for weight in self._quantized.values() for part in weight.parts.values()}
        self.shapes: dict[str, Sequence[int]] = {
            name: shape for name, shape in shapes.items() if name not in factors | parts
        }
        for name in self._quantized:
            self.shapes[name] = tuple(model.get_parameter(name).shape)

    def sources(self, name: str) -> tuple[str, ...]:
        """Return the names of the tensors from which a weight is made: its own, and its factors."""
        own = tuple(self._quantized[name].parts.values()) if name in self._quantized else (name,)
        return (*own, *_factors(name)) if name in self._adapted else own

    def merged(self, name: str, read: Callable[[str], Tensor]) -> Tensor:
        """Return a weight, from tensors that `read` returns by their names."""
        if name in self._quantized:
            weight = self._quantized[name].dequantized(self.shapes[name], read)
        else:
            weight = read(name)
        if name not in self._adapted:
            return weight
        first, second = map(read, _factors(name))
        product = second.float() @ first.float() * self._scaling
        if isinstance(self._model.get_submodule(name.rpartition(".")[0]), Conv1D):
            product = product.t()
        return (weight.float() + product).to(weight.dtype)


def _factors(weight: str) -> tuple[str, str]:
    layer = weight.removesuffix(".weight")
    return f"{layer}.{ATTRIBUTE}.A", f"{layer}.{ATTRIBUTE}.B"
