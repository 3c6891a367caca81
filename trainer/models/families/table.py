"""The table of model families, and finding a model's place in it; matching is strict."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from trainer.errors import UsageError
from trainer.models.families.bert import BERT, ELECTRA, ROBERTA, XLM_ROBERTA
from trainer.models.families.distilbert import DISTILBERT
from trainer.models.families.family import ModelFamily
from trainer.models.families.gpt2 import GPT2
from trainer.models.families.llama import LLAMA, MISTRAL, QWEN2
from trainer.models.families.modernbert import MODERNBERT
from trainer.models.families.vit import VIT

FAMILIES: dict[str, ModelFamily] = {
    family.model_type: family
    for family in (
        BERT, ROBERTA, XLM_ROBERTA, ELECTRA, DISTILBERT, MODERNBERT, GPT2, LLAMA, MISTRAL, QWEN2, VIT
    )
}  # fmt: skip


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


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern of a family stands for the module `name`."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) is not None


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated layers of a model, by name, in order.

    Raises:
        UsageError: the model is in no family, or its family's pattern matches nothing.
    """
    family = family_of(model)
    base: Any = model.base_model
    layers = {name: module for name, module in base.named_modules() if matches(family.layers, name)}
    if not layers:
        raise UsageError(
            f"the family {family.model_type} says that layers are `{family.layers}`, but none is in this model"
        )
    return layers
