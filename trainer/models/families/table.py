"""The table of model families, and finding a model's place in it; matching is strict."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from trainer.errors import UsageError
from trainer.models.families.albert import ALBERT
from trainer.models.families.bert import BERT, ELECTRA, ROBERTA, XLM_ROBERTA
from trainer.models.families.deberta import DEBERTA_V2
from trainer.models.families.distilbert import DISTILBERT
from trainer.models.families.family import ModelFamily
from trainer.models.families.gpt2 import GPT2
from trainer.models.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from trainer.models.families.modernbert import MODERNBERT
from trainer.models.families.t5 import T5
from trainer.models.families.vit import VIT

FAMILIES: dict[str, ModelFamily] = {
    family.model_type: family
    for family in (
        BERT, ROBERTA, XLM_ROBERTA, ELECTRA, ALBERT, DEBERTA_V2, DISTILBERT, MODERNBERT, GPT2, LLAMA, MISTRAL, QWEN2,
        QWEN3, T5, VIT,
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
    """Whether a pattern of a family stands for the module `name`: `*` is one part of it, `(this|that)` either."""
    return re.fullmatch(pattern.replace(".", r"\.").replace("*", r"[^.]+"), name) is not None


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


def is_shared_dropout(model: nn.Module, name: str) -> bool:
    """Whether the dropout `name` works on a tensor that has no batch, as its family knows."""
    family = FAMILIES.get(getattr(getattr(model, "config", None), "model_type", ""))
    return family is not None and any(
        matches(pattern, relative_name(model, name)) for pattern in family.shared_dropouts
    )


def relative_name(model: Any, name: str) -> str:
    """The name of a module of `model` as patterns say it: relative to the base model, or else to the whole."""
    return name if model.base_model is model else name.removeprefix(f"{model.base_model_prefix}.")
