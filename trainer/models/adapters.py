"""Adapters of a Hugging Face model, by names and patterns of its modules."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from trainer.base.errors import Problems, UsageError
from trainer.base.text import listed
from trainer.models.adapter_starts import Start, joined_starts, product_start, rows_start
from trainer.models.added import is_added
from trainer.models.families.table import layers_of, layers_pattern
from trainer.models.merged_weights import parts_of_products
from trainer.models.names import aliases, last_parts, matched_parameters, nothing_matches, owner_of, tied_names
from trainer.models.registered_forms import form_of
from trainer.models.weight_form import WeightForm
from trainer.parallel.stored_in_parts import LinearInParts, StoredInParts, weights_in_parts
from trainer.parallel.tensor.kinds import ATTRIBUTE, ROWS
from trainer.parallel.tensor.low_rank import Factors, LowRank, Magnitude, attach, drawn_factor, product_of
from trainer.parallel.tensor.trained_rows import TrainedRows, rows_of
from trainer.recipe.registered import all_of
from trainer.recipe.schema import Adapter, Model
from trainer.recipe.schema.model import matches

_LEAST_LEFT_OUT = 0.05  # of the parameters, for a note
_KNOWN = nn.Linear | Conv1D | nn.Embedding | LinearInParts
_LANGUAGE_HEADS = ("ForMaskedLM", "ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


@dataclass(frozen=True)
class PartsAdder:
    """A kind of parts of an adapter that a feature adds to a whole model, perhaps on `meta`; also without its key."""

    # A function of the model, the keys and the seed, which returns the names of the weights with a product.
    add: Callable[[nn.Module, Model, Adapter, int], Collection[str]]
    adapts: Callable[[nn.Module], bool] = lambda _: False  # whether the key reaches weights of a module
    starts: Callable[[nn.Module, Adapter], Mapping[str, Start]] = lambda *_: {}  # by the names of weights


def add_adapter(model: nn.Module, recipe: Model, adapter: Adapter, seed: int, drawn: Collection[str]) -> None:
    """Add the products and further parts of an adapter; see `adapt` of `models/freezing.py`.

    Frozen weights get the form that the recipe asks for.
    """
    names = {*_add_products(model, adapter, seed, drawn)}
    adders: Mapping[str, PartsAdder] = all_of("adapter")
    for adder in adders.values():
        names |= {*adder.add(model, recipe, adapter, seed)}
    _require_patterns(adapter, names)
    if recipe.new_tokens is not None:
        _require_trained_rows(model)
    # The order matters. Another form replaces the weights, so their exact values are held by `weights` before it;
    # starts need both values, so they are computed after it.
    starts = starts_of(model, adapter, seed)
    weights = {name: model.get_parameter(name) for name in starts}
    if (form := form_of(recipe)) is not None:
        form.replace_layers(model)
    for name, start in starts.items():
        if not weights[name].is_meta:
            _begin(model, name, weights[name].detach(), start)


@torch.no_grad()
def _begin(model: nn.Module, name: str, weight: Tensor, start: Start) -> None:
    """Give the parameters of an adapter the values that they begin with, from the weight `name`."""
    in_parts = weights_in_parts(model).get(name)
    for part, value in start(weight, in_parts.rounded(weight) if in_parts else weight).items():
        model.get_parameter(part).copy_(value)


def _require_trained_rows(model: Any) -> None:
    embedding = model.get_input_embeddings()
    if not embedding.weight.requires_grad and rows_of(embedding) is None:
        raise UsageError(
            "`model.adapter.modules_to_save` must name the embedding to train `model.new_tokens`, but leaves it frozen;"
            " add it"
        )


def _add_products(model: nn.Module, adapter: Adapter, seed: int, drawn: Collection[str]) -> Collection[str]:
    if adapter.modules_to_save is None:
        saved = _head_parameters(model) | set(drawn)
    else:
        saved = matched_parameters(model, adapter.modules_to_save, "model.adapter.modules_to_save")
    targets = _targets(model, adapter, saved)
    # Freeze all, then free `saved`; factors are made afterwards, and are trained by default.
    model.requires_grad_(False)
    for name in saved:
        model.get_parameter(name).requires_grad_(True)
    for name, layer in targets.items():
        attach(layer, _product(name, layer, adapter, seed), isinstance(layer, Conv1D))
    return targets


def _product(name: str, layer: Any, adapter: Adapter, seed: int) -> LowRank:
    # `Conv1D` stores `[in, out]`.
    out_features, in_features = reversed(layer.weight.shape) if isinstance(layer, Conv1D) else layer.weight.shape
    rank, device = adapter.rank_of(name), "meta" if layer.weight.is_meta else "cpu"
    sizes = in_features, out_features
    # A start from singular vectors has at most as many as the smaller side of the matrix.
    most, condition = (max(sizes), "") if adapter.start is None else (min(sizes), f" with `start` {adapter.start}")
    if rank > most:
        raise UsageError(
            f"`model.adapter.rank` must be at most {most}{condition}, because {name} has {in_features} inputs and"
            f" {out_features} outputs, but is {rank}; lower it, or give this layer a rank in"
            " `model.adapter.rank_pattern`"
        )
    shapes = {"A": (rank, in_features), "B": (out_features, rank)}

    def factor(which: str) -> Tensor:
        if device == "meta":
            return torch.empty(shapes[which], device="meta")
        # Drawn from a stream of the layer's name, so that every layout has the same factors.
        return drawn_factor(f"{name}.{ATTRIBUTE}.{which}", shapes[which], seed)

    return LowRank(
        factor("A"),
        factor("B"),
        adapter.scaling_of(name),
        # torch's own dropout, because `key_dropout` replaces it later, with all others of the model.
        nn.Dropout(adapter.dropout),
        Magnitude(torch.empty(out_features, device=device)) if adapter.type == "dora" else None,
        # PiSSA's first values are subtracted in the forward pass; see `adapter_starts.py`.
        None if adapter.start in (None, "loftq") else (factor("A"), factor("B")),
    ).train(layer.training)


def starts_of(model: nn.Module, adapter: Adapter, seed: int) -> dict[str, Start]:
    """Return the functions from a weight to parameters of an adapter, by all names of the weight."""
    starts: dict[str, Start] = {}
    for name, layer in model.named_modules():
        if product_of(layer) is not None:
            start = product_start(name, adapter, seed, isinstance(layer, Conv1D))
            starts |= {} if start is None else {f"{name}.weight": start}
    for adder in all_of("adapter").values():
        starts |= adder.starts(model, adapter)
    # Rows of a tied weight are trained once; the start stands under each of its names.
    for names in aliases(model).values():
        layers = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
        with_rows = [name for name in layers if rows_of(model.get_submodule(name)) is not None]
        if with_rows:
            ids = rows_of(model.get_submodule(with_rows[0])).ids.tolist()
            start = rows_start(f"{with_rows[0]}.{ROWS}.rows", ids)
            starts |= {name: joined_starts(start, starts[name]) if name in starts else start for name in names}
    return starts


def _require_patterns(adapter: Adapter, targets: Collection[str]) -> None:
    problems = Problems()
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(adapter, key):
            with problems.collect():
                if not any(matches(pattern, name) for name in targets):
                    raise nothing_matches(f"model.adapter.{key}", pattern, list(targets), "adapted layers")
    problems.raise_all()


def factor_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of all products, by the names of the parameters."""
    return {
        f"{name}.{factor}": tuple(parameter.shape)
        for name, module in model.named_modules()
        if isinstance(module, Factors)
        for factor, parameter in module.named_parameters()
    }


def _head_parameters(model: Any) -> set[str]:
    """Return the parameters outside of the base model, but not the head of a language model, which is no fresh one."""
    if any(mark in type(model).__name__ for mark in _LANGUAGE_HEADS) or model.base_model is model:
        return {name for name, _ in model.named_parameters() if is_added(name)}
    # By identity: a head that is tied to the embedding belongs to the base model.
    base = {id(parameter) for parameter in model.base_model.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) not in base}


def _targets(model: Any, adapter: Adapter, saved: Collection[str]) -> dict[str, nn.Module]:
    """Return the layers with a product, by name; `saved` are the parameters that are trained whole."""
    linear = {name: m for name, m in model.named_modules() if type(m) is nn.Linear or isinstance(m, Conv1D)}
    if adapter.targets is None:
        if layers_pattern(model.config) is None:
            raise _unknown_layers(model, linear)
        # Linear layers inside of the repeated layers only; the head and the pooler are not adapted by default.
        inside = {id(part) for layer in layers_of(model).values() for part in layer.modules()}
        return {name: module for name, module in linear.items() if id(module) in inside}
    if adapter.targets == "all-linear":
        return {name: module for name, module in _inner(model, linear).items() if f"{name}.weight" not in saved}
    targets: dict[str, nn.Module] = {}
    problems = Problems()
    for pattern in adapter.targets:
        with problems.collect():
            targets |= _matched_layers(model, pattern, linear)
    problems.raise_all()
    return targets


def _matched_layers(model: nn.Module, pattern: str, linear: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    names = [name for name, _ in model.named_modules() if name and matches(pattern, name)]
    if not names:
        raise nothing_matches("model.adapter.targets", pattern, list(linear))
    if other := next((name for name in names if name not in linear), None):
        raise UsageError(
            f"`model.adapter.targets` must name linear layers, but {pattern!r} matches {other}, which is a"
            f" {type(model.get_submodule(other)).__name__}; use names such as {listed(last_parts(linear), 3)}"
        )
    # A product on a tied weight would change the other module as well when it is merged.
    tied = {owner_of(name) for of_weight in tied_names(model) for name in of_weight}
    if other := next((name for name in names if name in tied), None):
        raise UsageError(
            f"`model.adapter.targets` must name layers with weights of their own, but the weight of {other} is tied to"
            f" another module; remove {pattern!r}"
        )
    return {name: linear[name] for name in names}


def _inner(model: Any, linear: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the linear layers without heads; PEFT's "all-linear" leaves out the output head as well."""
    head, output = _head_parameters(model), model.get_output_embeddings()
    return {name: layer for name, layer in linear.items() if layer is not output and f"{name}.weight" not in head}


def _unknown_layers(model: Any, linear: Mapping[str, nn.Module]) -> UsageError:
    """Return the error of a model with unknown layers; it names the linear layers that read texts."""
    linear = _inner(model, linear)
    reads_texts = model if model.config.is_encoder_decoder else model.get_decoder()  # another part may read images
    inside = {id(part) for part in reads_texts.modules()}
    candidates = [name for name, module in linear.items() if id(module) in inside] or list(linear)
    others = linear.keys() - set(candidates)
    use = "use " if others else 'use "all-linear", or '
    return UsageError(
        f"`model.adapter.targets` must be set for a model of type {model.config.model_type!r}, because its repeated"
        f" layers are unknown; {use}{json.dumps(_shortest_patterns(candidates, others))}"
    )


def _shortest_patterns(names: Collection[str], others: Collection[str]) -> list[str]:
    """Return patterns with the last parts of these names that match none of the others."""
    patterns: dict[str, None] = {}
    for name in names:
        *outer, last = name.split(".")
        # From the shortest pattern to the full name, which matches no other module.
        ends = (last, *(f"{part}.*.{last}" for part in reversed(outer) if not part.isdigit()), name)
        fitting = (end for end in ends if matches(end, name) and not any(matches(end, other) for other in others))
        patterns[next(fitting)] = None
    return list(patterns)


def reach_note(model: nn.Module, form: WeightForm | None) -> str:
    """Return a note on the share of the weights that an adapter reaches, and on matrices that it leaves out.

    These are the matrices of modules that are no linear layers, such as convolutions and experts.
    """
    adapted = parts_of_products(name for name, _ in model.named_parameters())
    total = reached = 0
    left: Counter[str] = Counter()
    for name, module in model.named_modules():
        if isinstance(module, Factors | TrainedRows):
            continue
        weights = {f"{name}.{key}": (p.shape, p.requires_grad) for key, p in module.named_parameters(recurse=False)}
        weights = {name: (torch.Size(module.shape), False)} if isinstance(module, StoredInParts) else weights
        for weight, (shape, is_trained) in weights.items():
            owner = owner_of(weight)
            total += shape.numel()
            if weight in adapted:
                reached += shape.numel()
            elif len(shape) > 1 and not is_trained and not isinstance(model.get_submodule(owner), _KNOWN):
                left[owner] += shape.numel()
    note = f"`model.adapter` reaches layers with {reached:,} of {total:,} parameters ({reached / total:.1%})"
    if left.total() < _LEAST_LEFT_OUT * total:
        return note
    largest = max(left, key=lambda name: left[name])
    module = model.get_submodule(largest)
    keys = [f"`{key}` adds them" for key, adder in all_of("adapter").items() if adder.adapts(module)]
    is_whole = form is not None and not any(isinstance(part, StoredInParts) for part in module.children())
    return (
        f"{note}; {left.total() / total:.1%} are no linear layers, such as {largest} ({type(module).__name__}):"
        f" {keys[0] if keys else 'it cannot adapt them'}{f', and {form} leaves them whole' if is_whole else ''}"
    )
