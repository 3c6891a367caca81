"""The table of model families, and finding a model's place in it; matching is strict."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from trainer.errors import UsageError
from trainer.models.families.bert import BERT
from trainer.models.families.family import ModelFamily

FAMILIES: dict[str, ModelFamily] = {family.model_type: family for family in (BERT,)}


def family_of(model: nn.Module) -> ModelFamily:
    """The family of a transformers model.

    Raises:
        UsageError: it is in no family of the table.
    """
    config: Any = model.config
    if config.model_type not in FAMILIES:
        raise UsageError(
            f"this recipe needs to find the layers of the model, but model type {config.model_type!r} is in no family"
            f" of models; known are {', '.join(sorted(FAMILIES))}; add a file to"
            " `trainer/models/families/` and its row to `table.py`"
        )
    return FAMILIES[config.model_type]


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated layers of a model, by name, in order.

    Raises:
        UsageError: the model is in no family, or its family's pattern matches nothing.
    """
    family = family_of(model)
    base: Any = model.base_model
    pattern = re.compile(re.escape(family.layers).replace(r"\*", r"[^.]+"))
    layers = {name: module for name, module in base.named_modules() if pattern.fullmatch(name)}
    if not layers:
        raise UsageError(
            f"the family {family.model_type} says that layers are `{family.layers}`, but none is in this model"
        )
    return layers
