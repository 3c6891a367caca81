"""The tensors of a pretrained model's files, matched with the parameters of the model.

transformers loads the checkpoint into the model once with tensors on `meta`. This load maps tensors of the files to
parameters, and finds missing and unexpected ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils import CONFIG_NAME

from trainer.base.errors import UsageError
from trainer.models.configuration import vocabulary_size
from trainer.models.describe import ModelDescription, sizes_differ
from trainer.models.hub_files import CannotLoadPartsError, require_safe_shards, without_report
from trainer.models.names import replace_in
from trainer.models.registered_forms import form_of
from trainer.models.stored_weights import Sources, StoredWeights
from trainer.recipe.schema import Model


def check_weights(described: ModelDescription, compares_sizes: bool = True) -> list[str]:
    """Check that the files of pretrained weights exist and fit the model; their values are not read.

    Returns the parameters that the files lack, as far as these can be compared.

    Args:
        compares_sizes: whether to compare sizes, which may depend on options of the task.

    Raises:
        UsageError: the files are missing, or of other sizes.
    """
    if described.recipe.is_random:
        return []
    require_safe_shards(described.recipe, described.config)
    if not compares_sizes:
        return []
    with described.explained():
        try:
            return match(described, fitted(described, StoredWeights(described.files())))[1].missing
        except CannotLoadPartsError:
            return []  # such a model is compared when it is loaded


def fitted(described: ModelDescription, stored: StoredWeights) -> StoredWeights:
    """Return stored weights by the names of whole ones, with the rows of new tokens and without those of a new head."""
    form = form_of(described.recipe)
    encoded = form is not None and form.stored_in(stored.shapes)
    recipe = described.recipe
    if recipe.is_random or not (encoded or recipe.new_tokens or recipe.new_head):
        return stored
    from trainer.models.changed_weights import EnlargedWeights, FewerWeights  # most models keep their shapes

    model = described.on_meta()
    renamed = renamed_keys(model, stored)[0]
    if recipe.new_head:
        head = _head(model, renamed, recipe)
        stored = FewerWeights(stored, {renamed.pop(name) for name in head})
    shapes = {key: tuple(model.state_dict()[name].shape) for name, key in renamed.items()}
    if form is not None and encoded:
        described.adapt(model)
        stored = form.opened(recipe, stored, model, renamed, shapes)
    if not recipe.new_tokens:
        return stored
    size = vocabulary_size(described.config)
    larger = {key: after for key, after in shapes.items() if _has_more_tokens(stored.shapes[key], after, size)}
    return EnlargedWeights(stored, larger)


def _head(model: nn.Module, renamed: Mapping[str, str], recipe: Model) -> list[str]:
    head = [name for name in renamed if _is_in_head(model, name)]
    if not head or len(head) == len(renamed):
        raise UsageError(
            f"`model.new_head` is true, but the checkpoint {recipe.name_or_path} has no head for this task that"
            " could be replaced; set it to false"
        )
    return head


def _is_in_head(model: Any, name: str) -> bool:
    return not name.startswith(f"{model.base_model_prefix}.")


def _has_more_tokens(before: Sequence[int], after: Sequence[int], size: int | None) -> bool:
    """Return whether exactly one dimension differs, and has grown to the size of the vocabulary."""
    changes = [(old, new) for old, new in zip(before, after, strict=False) if old != new]
    return len(before) == len(after) and len(changes) == 1 and changes[0][0] < changes[0][1] == size


def match(described: ModelDescription, stored: StoredWeights) -> tuple[nn.Module, Sources]:
    with without_report():
        model, loading = described.model_class.from_pretrained(
            None,
            config=described.config,
            # Tensors without memory: transformers matches names and shapes, and reads nothing.
            state_dict={key: torch.empty(shape, device="meta") for key, shape in stored.shapes.items()},
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the error below names them
            **described.keyword_arguments,
        )
    if mismatched := sorted(loading["mismatched_keys"]):
        shapes = "; ".join(f"{name} is {list(stored)} and not {list(shape)}" for name, stored, shape in mismatched[:3])
        in_head = [_is_in_head(model, name) for name, *_ in mismatched]
        raise sizes_differ(f"{len(mismatched)} weights ({shapes})", all(in_head))
    return model, _sources(model, stored, loading)


def _sources(model: Any, stored: StoredWeights, loading: Mapping[str, Any]) -> Sources:
    """Map tensors of the files to those of the model, and tie weights that the files hold twice with equal values.

    transformers ties such weights, too, when it loads their values.
    """
    renamed, converted = renamed_keys(model, stored)
    missing = sorted(loading["missing_keys"])
    notes = []
    # A list, because the loop deletes ties.
    for target, source in list(model.all_tied_weights_keys.items()):
        if target not in renamed or source not in renamed:
            continue
        if stored.equal(renamed[target], renamed[source]):
            replace_in(model, target, model.get_parameter(source))
            del renamed[target]
        else:
            del model.all_tied_weights_keys[target]
            notes.append(f"differ in the checkpoint, so they are not tied: {source}, {target}")
    return Sources(renamed, converted, missing, [*notes, *loading_notes(missing, loading)])


def renamed_keys(model: Any, stored: StoredWeights) -> tuple[dict[str, str], list[list[str]]]:
    """Return the tensors of files by the parameters that they fill, and groups of those that are merged or split.

    The rules are those of transformers for the model class.
    """
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    expected, prefix = model.state_dict(), model.base_model_prefix
    renamed: dict[str, str] = {}
    converted: dict[str, list[str]] = {}
    for key in stored.shapes:
        name, pattern = rename_source_key(key, renamings, converters, prefix, expected)
        # Rules for older names may also match a current name.
        if name not in expected and key in expected:  # a current name that matches the rule for an older one
            name, pattern = rename_source_key(key, [], [], prefix, expected)
        if name not in expected:
            continue
        if pattern is not None:
            # A converter merges or splits tensors, so their parts cannot be read in slices.
            converted.setdefault(name, []).append(key)
        elif name in renamed:
            raise CannotLoadPartsError(f"{key} and {renamed[name]} in its files are both {name}")
        else:
            renamed[name] = key
    return renamed, list(converted.values())


def take_origin(model: Any, recipe: Model) -> None:
    """Set the name of the model's origin, and its generation configuration, as transformers does."""
    name = str(recipe.name_or_path)
    model.name_or_path = model.config.name_or_path = name
    if model.can_generate():
        revision = recipe.revision or "main"
        try:
            model.generation_config = GenerationConfig.from_pretrained(name, revision=revision)
        except OSError:  # older folders have the settings in `config.json`, without which a configuration is made
            model.generation_config = GenerationConfig.from_pretrained(
                name, config_file_name=CONFIG_NAME, revision=revision, _from_model_config=True
            )


def loading_notes(missing: Sequence[str], loading: Mapping[str, Any]) -> list[str]:
    notes = [f"not in the checkpoint, initialised at random: {', '.join(missing)}"] if missing else []
    unexpected = sorted(loading["unexpected_keys"])
    return [*notes, f"in the checkpoint, not in this model: {', '.join(unexpected)}"] if unexpected else notes
