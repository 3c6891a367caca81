"""By which names a model knows its parameters."""

from __future__ import annotations

from torch import nn


def aliases(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """All names of each parameter, in the order of the model: several where it is tied."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names
