"""The model of a recipe as it was before its training."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn

from trainer.models.describe import ModelDescription, ModelUse
from trainer.models.hub_files import not_found
from trainer.models.matching import fitted, renamed_keys
from trainer.models.registered_forms import form_of
from trainer.models.stored_weights import StoredWeights
from trainer.models.weight_form import PartsByName
from trainer.models.whole_model import load_whole
from trainer.recipe.schema import Model


def build_base(model: Any, recipe: Model, seed: int) -> tuple[nn.Module, list[str], PartsByName]:
    """Build the model of a recipe as it was before the training, without adapter, whole and in fp32 on the CPU.

    The second result names the weights that are not loaded, but drawn from the seed. The third has the tensors of
    weights that the files hold in the form of the recipe.

    Args:
        model: the model on `meta`, from `described_model`.

    Raises:
        UsageError: the weights cannot be loaded.
    """
    config = copy.deepcopy(model.config)
    if recipe.is_random and "pad_token_id" not in (recipe.config or {}):
        config.pad_token_id = type(config)().pad_token_id  # a run sets the tokenizer's after the weights are drawn
    model_class = type(model)
    # Weights depend neither on the attention function nor on keyed dropout, so any choice gives the same ones.
    described = ModelDescription(recipe, ModelUse(model_class.__name__), seed, config, model_class, "eager", False)
    try:
        return *load_whole(described)[:2], _encoded_already(described)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise not_found("model.name_or_path", str(recipe.name_or_path), error) from error


def _encoded_already(described: ModelDescription) -> dict[str, Mapping[str, Tensor]]:
    """Return the tensors of the weights that files hold in the form of the recipe, by the names of the weights."""
    if described.recipe.is_random or form_of(described.recipe) is None:
        return {}
    stored = fitted(described, StoredWeights(described.files()))
    renamed = renamed_keys(described.on_meta(), stored)[0]
    return {name: parts for name, key in renamed.items() if (parts := stored.parts(key)) is not None}
