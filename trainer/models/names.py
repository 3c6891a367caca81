"""Names of a model's parameters; a tied parameter has several names."""

from __future__ import annotations

from torch import nn


def aliases(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return all names of each parameter, in the order of the model."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return the names of each tied parameter, in the order of the model."""
    return [names for names in aliases(model).values() if len(names) > 1]
