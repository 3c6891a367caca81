"""Learning rates, weight decays and first steps of single parameters.

The keys are `optimizer.groups`, `optimizer.layer_decay` and `model.unfreeze_at_step`.

Rules are found on the whole model, before it is cut, so every layout has the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from trainer.base.errors import Problems, UsageError
from trainer.base.text import listed
from trainer.models.families.family import matches
from trainer.models.families.table import FAMILIES, layers_of
from trainer.models.freezing import frozen_parameters
from trainer.models.names import aliases, matched_parameters
from trainer.recipe.schema import Model, OptimizerKeys


@dataclass(frozen=True)
class ParameterRule:
    origin: str  # the patterns of its group, or its part of the model
    rate: float  # its learning rate, as a multiple of `optimizer.learning_rate`
    weight_decay: float  # its weight decay, unless it is a bias or a norm weight


@dataclass(frozen=True)
class ParameterGroups:
    # the rule of each parameter, by name; empty: all parameters have the values of the optimizer
    rules: Mapping[str, ParameterRule] = field(default_factory=dict)
    # the header and the rows of a table of the trained parameters; empty without rules
    table: tuple[tuple[str, ...], ...] = ()
    # the parameters without an update before the step `model.unfreeze_at_step`, by name
    late: frozenset[str] = frozenset()


def parameter_groups(model: nn.Module, keys: Model, optimizer: OptimizerKeys) -> ParameterGroups:
    """Return the groups of the parameters of a whole model, perhaps on `meta`.

    A group's own learning rate does not decay over layers.

    Raises:
        UsageError: a pattern matches nothing, two groups match one parameter, all matches of a group are frozen, or
            the layers of the model are unknown.
    """
    late = frozenset[str]()
    if keys.unfreeze_at_step is not None and keys.freeze is not None:
        late = frozenset(frozen_parameters(model, keys.freeze).values())
    if optimizer.groups is None and optimizer.layer_decay is None:
        return ParameterGroups(late=late)
    rules = {name: ParameterRule("others", 1.0, optimizer.weight_decay) for name, _ in model.named_parameters()}
    if optimizer.layer_decay is not None:
        for name, (part, power) in _heights(model).items():
            rules[name] = ParameterRule(part, optimizer.layer_decay**power, optimizer.weight_decay)
    owners: dict[str, str] = {}
    problems = Problems()
    for index, group in enumerate(optimizer.groups or ()):
        patterns = [group.match] if isinstance(group.match, str) else group.match
        key, origin = f"optimizer.groups[{index}].match", listed(patterns, 3)
        with problems.collect():
            for name in _matched(model, patterns, key):
                if name in owners:
                    raise UsageError(
                        f"`{key}` must match other parameters than earlier groups, but {origin} and {owners[name]} both"
                        f" match {name}; narrow one of them"
                    )
                owners[name] = origin
                decay = optimizer.weight_decay if group.weight_decay is None else group.weight_decay
                set_rate = group.learning_rate
                # A group without a rate keeps the one of its layer.
                rate = rules[name].rate if set_rate is None else set_rate / optimizer.learning_rate
                rules[name] = ParameterRule(origin, rate, decay)
    problems.raise_all()
    return ParameterGroups(rules, _table(model, optimizer, rules), late)


def _table(
    model: nn.Module, optimizer: OptimizerKeys, rules: Mapping[str, ParameterRule]
) -> tuple[tuple[str, ...], ...]:
    by_rule: dict[ParameterRule, list[int]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            by_rule.setdefault(rules[name], []).append(parameter.numel())
    rows = [
        (
            rule.origin,
            f"{len(sizes):,}",
            f"{sum(sizes):,}",
            f"{rule.rate * optimizer.learning_rate:.4g}",
            f"{rule.weight_decay:g}",
        )
        for rule, sizes in by_rule.items()
    ]
    return ("group", "tensors", "parameters", "learning rate", "weight decay"), *rows


def _matched(model: nn.Module, patterns: Sequence[str], key: str) -> list[str]:
    any_names = matched_parameters(model, patterns, key)
    matched = {names[0]: parameter for parameter, names in aliases(model).items() if any_names.intersection(names)}
    if not any(parameter.requires_grad for parameter in matched.values()):
        raise UsageError(
            f"`{key}` must match trained parameters, but {listed(patterns, 3)} matches frozen ones only; name others"
        )
    return list(matched)


def _heights(model: nn.Module) -> dict[str, tuple[str, int]]:
    """Return the part of the model and the power of the decay over layers of each parameter.

    The head has power 0, the top layer 1, and the embeddings one more than the lowest layer. An encoder is below its
    decoder.
    """
    layers = layers_of(model, "`optimizer.layer_decay`")
    powers = {name: len(layers) - index for index, name in enumerate(layers)}
    heights: dict[nn.Parameter, tuple[str, int]] = {}
    for module, layer in _around(model, list(layers)):
        part = ("embeddings", len(layers) + 1) if layer is None else (layer, powers[layer])
        heights |= dict.fromkeys(module.parameters(), part)
    # Layers last: an embedding inside of a layer, such as a position bias, belongs to its layer.
    for name, module in layers.items():
        heights |= dict.fromkeys(module.parameters(), (name, powers[name]))
    # A weight that is tied to the embedding counts as the embedding.
    return {names[0]: heights.get(parameter, ("head", 0)) for parameter, names in aliases(model).items()}


def _around(model: Any, layers: Sequence[str]) -> Iterator[tuple[nn.Module, str | None]]:
    """Yield the modules around the layers, and the layer with the rate of each; None: the rate of the embeddings."""
    family = FAMILIES.get(model.config.model_type)
    modules = dict(model.base_model.named_modules())
    for stack in family.stages.stacks if family and family.stages else ():
        last = [name for name in layers if matches(stack.layers, name)][-1]
        for patterns, layer in ((stack.before, None), (stack.after, last)):
            yield from (
                (modules[name], layer) for name in modules if any(matches(pattern, name) for pattern in patterns)
            )
    if family is None or family.stages is None:
        yield from ((module, None) for module in modules.values() if isinstance(module, nn.Embedding))
