"""Noise on the embeddings of tokens in training (NEFTune, Jain et al. 2023, arXiv:2310.05914)."""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from trainer.base.errors import UsageError
from trainer.features.embedding_noise.section import alpha_of
from trainer.models.place import PlacedModel
from trainer.parallel.dropout import DropoutKeys
from trainer.parallel.random import LANE_LEVELS, element_keys, random_lanes
from trainer.recipe.schema import Recipe

_SITE = "embedding_noise"


def of_recipe(built: PlacedModel, recipe: Recipe) -> None:
    """Add the noise of a recipe; see `add_noise`."""
    alpha = alpha_of(recipe.model)
    assert alpha is not None
    add_noise(built, alpha)


def add_noise(built: PlacedModel, alpha: float) -> None:
    """Add noise to the embeddings of tokens in training; a pipeline stage without them stays as it is.

    The noise is uniform in (-m, m), with m = `alpha` / sqrt(L d) for a row of L tokens and a width of d. It depends on
    the seed, the step, the row and the position, as dropout does.

    Raises:
        UsageError: the model has no embedding of tokens.
    """
    model: Any = built.model
    embedding = model.get_input_embeddings()
    keys = built.dropout_keys
    assert keys is not None, "the noise is keyed as dropout is"
    if model.main_input_name != "input_ids" or not isinstance(embedding, nn.Module):
        raise UsageError(
            f"`model.neftune_alpha` needs a model with an embedding of tokens, but {type(model).__name__} has none; set"
            " it to null"
        )
    if next(embedding.parameters(recurse=False), None) is None:
        return  # a stand-in for the module of another stage

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + _noise(output, keys, alpha) if module.training else output

    embedding.register_forward_hook(hook)


@torch.no_grad()
def _noise(embedded: Tensor, keys: DropoutKeys, alpha: float) -> Tensor:
    """Return the noise of embeddings `[batch, positions, width]`, of 65,536 levels for each element."""
    _, num_positions, width = embedded.shape
    # The keys of dropout under a site of its own, so noise and masks are independent.
    of_tokens = element_keys(keys.row_keys(_SITE, embedded.shape), [num_positions], [0])
    # The middle of each level, so the mean of the noise is 0.
    levels = random_lanes(of_tokens, width).float().add_(0.5)
    mask = keys.key.mask if keys.key else None
    if mask is None:
        return levels.mul_(2 * alpha / sqrt(num_positions * width) / LANE_LEVELS).to(embedded.dtype)
    # The length of the row and not of the padded batch, so that padding does not change the noise.
    lengths = mask.sum(-1).clamp(min=1)
    scale = (lengths * width).rsqrt() * (2 * alpha / LANE_LEVELS)
    return levels.mul_(scale[:, None, None]).to(embedded.dtype)
