"""Names of a model's parameters and modules; a tied parameter has several names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

import torch
from torch import nn

from trainer.base.errors import Problems, UsageError
from trainer.base.text import listed
from trainer.recipe.schema.model import matches


def aliases(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return all names of each parameter, in the order of the model."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return the names of each tied parameter, in the order of the model."""
    return [names for names in aliases(model).values() if len(names) > 1]


def owner_of(name: str) -> str:
    """Return the name of the module that has the parameter or submodule `name`; empty for the model itself."""
    return name.rpartition(".")[0]


def replace_in(model: nn.Module, name: str, value: nn.Module | nn.Parameter) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, value)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the buffers of a model to `device`; its parameters stay."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def parts_of_layers(names: Iterable[str], attribute: str) -> dict[str, dict[str, str]]:
    """Return the tensors of a part that layers have as an attribute, such as a product: by layer, the name of each."""
    layers: dict[str, dict[str, str]] = {}
    for name in names:
        # The dot in front lets a model that is itself the layer match.
        layer, mark, part = f".{name}".partition(f".{attribute}.")
        if mark:
            layers.setdefault(layer[1:], {})[part] = name
    return layers


def prefixes(name: str) -> list[str]:
    """Return the names of the modules around a module, the outermost first, and its own name."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def matched_parameters(model: nn.Module, patterns: Sequence[str], key: str) -> set[str]:
    """Return the parameters that a pattern matches, or in modules that it matches."""
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    matched: set[str] = set()
    problems = Problems()
    for pattern in patterns:
        names = {name for name in parameters if any(matches(pattern, part) for part in prefixes(name))}
        with problems.collect():
            if not names:
                raise nothing_matches(key, pattern, [part for name in parameters for part in prefixes(name)])
        matched |= names
    problems.raise_all()
    return matched


def last_parts(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names if not name.rpartition(".")[2].isdigit()))


def nothing_matches(key: str, pattern: str, names: Sequence[str], of: str = "modules of the model") -> UsageError:
    known = last_parts(names)
    last = pattern.rpartition(".")[2]
    near = get_close_matches(last, known, n=3, cutoff=0.5) or known
    return UsageError(f"`{key}` must match {of}, but {pattern!r} matches none; use names such as {listed(near, 6)}")
