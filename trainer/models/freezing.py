"""Frozen parameters of a Hugging Face model, by patterns of their names; and the way to its adapters."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from trainer.base.errors import UsageError
from trainer.base.text import listed
from trainer.models.names import aliases, matched_parameters
from trainer.recipe.schema import Model


def adapt(model: nn.Module, recipe: Model, seed: int, drawn: Collection[str] = ()) -> None:
    """Freeze parameters and add adapters, as the recipe's `model` asks; the same for a model on `meta`.

    Args:
        model: the whole model of transformers, before dropout is keyed and before it is cut.
        drawn: the parameters with random weights in a pretrained model. An adapter trains them whole by default.

    Raises:
        UsageError: a pattern matches nothing, a target is no linear layer, or no parameter is left to train.
    """
    if recipe.freeze is not None and recipe.unfreeze_at_step is None:
        for parameter in frozen_parameters(model, recipe.freeze):
            # With `unfreeze_at_step`, they must have gradients from the start; the engine leaves out their updates.
            parameter.requires_grad_(False)
        _require_trained_tokens(model, recipe, recipe.freeze)
    if recipe.adapter is not None:
        from trainer.models.adapters import add_adapter

        add_adapter(model, recipe, recipe.adapter, seed, drawn)


def frozen_parameters(model: nn.Module, patterns: Sequence[str]) -> dict[nn.Parameter, str]:
    """Return the parameters that `model.freeze` matches by any of their names, with their first names.

    Raises:
        UsageError: a pattern matches nothing, or no other parameter is trained.
    """
    matched = matched_parameters(model, patterns, "model.freeze")
    # A tied weight is frozen if any of its names matches.
    frozen = {parameter: names[0] for parameter, names in aliases(model).items() if matched.intersection(names)}
    if all(parameter in frozen for parameter in model.parameters() if parameter.requires_grad):
        raise UsageError(
            f"`model.freeze` must leave a parameter to train, but {listed(patterns, 3)} match all; remove a pattern"
        )
    return frozen


def _require_trained_tokens(model: Any, recipe: Model, freeze: Sequence[str]) -> None:
    if recipe.new_tokens is not None and not model.get_input_embeddings().weight.requires_grad:
        raise UsageError(
            f"`model.freeze` must leave the embedding to train with `model.new_tokens`, but {listed(freeze, 3)}"
            " match it; use `model.adapter`, which trains the rows of new tokens only"
        )
