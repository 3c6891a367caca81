"""A model that cannot be filled in parts: transformers loads it whole before it is placed."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from trainer.base.errors import UsageError
from trainer.models.describe import ModelDescription
from trainer.models.draw import draw_weights
from trainer.models.hub_files import CannotLoadPartsError, require_safe_shards, without_report
from trainer.models.matching import fitted, loading_notes, take_origin
from trainer.models.place import ModelCut, PlacedModel, place
from trainer.models.registered_forms import form_of
from trainer.models.stored_weights import StoredWeights


def place_whole(described: ModelDescription, cut: ModelCut, reason: CannotLoadPartsError) -> PlacedModel:
    keys = described.new_keys()
    model, drawn, notes = load_whole(described)
    # In a random model all is drawn, which is no news for the user.
    lacking = () if described.recipe.is_random else drawn
    prepared = described.prepare(model, lacking, keys)
    notes = [*notes, *described.check_invariance(model, keys), *prepared]
    if cut != ModelCut():
        notes.append(f"every rank held the whole model for a moment while it was built, because {reason}")
    # The strategy shards whole parameters itself, so no shard is cut here.
    return place(model, replace(cut, shard=None, expert_shard=None), keys, notes, lacking, described.groups(model))


def load_whole(described: ModelDescription) -> tuple[nn.Module, list[str], list[str]]:
    """Return the model as transformers loads it, the names of weights that are drawn instead, and notes."""
    recipe, seed = described.recipe, described.seed
    with torch.random.fork_rng(devices=[]):
        # transformers draws weights that a checkpoint lacks; `draw_weights` replaces them by layout-invariant ones.
        torch.manual_seed(seed)
        if recipe.is_random:
            model = described.instantiate()
            drawn = [name for name, _ in model.named_parameters()]
            draw_weights(model, drawn, seed)
            return model, drawn, []
        require_safe_shards(recipe, described.config)
        tensors = _fitted_tensors(described)
        with without_report():
            model, loading = described.model_class.from_pretrained(
                recipe.name_or_path if tensors is None else None,
                config=described.config,
                state_dict=tensors,
                revision=recipe.revision or "main",
                use_safetensors=True,  # a pickle can run code
                trust_remote_code=False,
                output_loading_info=True,
                **described.keyword_arguments,
            )
    if tensors is not None:
        take_origin(model, recipe)
    # transformers returns a set, which has another order in each process.
    missing = sorted(loading["missing_keys"])
    if missing:
        draw_weights(model, missing, seed)
    return model, missing, loading_notes(missing, loading)


def _fitted_tensors(described: ModelDescription) -> dict[str, Tensor] | None:
    recipe, form = described.recipe, form_of(described.recipe)
    if recipe.new_tokens is None and form is None and not recipe.new_head:
        return None
    try:
        plain = StoredWeights(described.files())
        stored = fitted(described, plain)
    except CannotLoadPartsError as error:
        key = "model.new_tokens" if recipe.new_tokens is not None else form.key if form else "model.new_head"
        raise UsageError(
            f"`{key}` needs weights in safetensors files of the model itself, but {error}; save the model"
            " again with `save_pretrained` of transformers"
        ) from error
    # If no tensor was changed, transformers reads the files itself, without a second copy in memory.
    return None if stored is plain else {key: stored.read(key) for key in stored.shapes}
