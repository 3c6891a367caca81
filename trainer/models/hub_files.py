"""Files of a pretrained model, in a folder or in a repository of the hub."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file, is_peft_available
from transformers.utils.hub import get_checkpoint_shard_files

from trainer.base.errors import UsageError
from trainer.models.describe import CannotLoadPartsError, ModelDescription
from trainer.recipe.schema import Model

_MOST_FILES = 10_000


def find_file(recipe: Model, file: str) -> str | None:
    """Return the path of a file of a model's folder or of the hub; None if it has no such file.

    Raises:
        OSError: the hub cannot be reached.
    """
    found: str | None = cached_file(
        str(recipe.name_or_path), file, revision=recipe.revision or "main", _raise_exceptions_for_missing_entries=False
    )
    return found


def pretrained_files(described: ModelDescription) -> list[str]:
    """Return the safetensors files of a folder or of the hub: one file, or several files with an index.

    Raises:
        CannotLoadPartsError: the weights lie elsewhere, or in another form.
    """
    recipe, config = described.recipe, described.config
    for attribute, what in (
        ("quantization_config", "its weights are quantised"),
        ("transformers_weights", "its configuration names a file of weights of its own"),
        ("extra_files", "weights lie in further files"),
    ):
        if getattr(config, attribute, None):
            raise CannotLoadPartsError(what)
    name, revision = str(recipe.name_or_path), recipe.revision or "main"
    try:
        if is_peft_available() and find_file(recipe, "adapter_config.json") is not None:  # without PEFT, it is ignored
            raise CannotLoadPartsError("it is an adapter to another model")
        if (single := find_file(recipe, SAFE_WEIGHTS_NAME)) is not None:
            return [single]
        if (index := find_file(recipe, SAFE_WEIGHTS_INDEX_NAME)) is not None:
            _require_safe_names(name, index)
            return list(get_checkpoint_shard_files(name, index, revision=revision)[0])
    except OSError as error:  # the load of the whole model gives a better message
        raise CannotLoadPartsError(f"its files could not be listed ({error})") from error
    raise CannotLoadPartsError(f"it has neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}")


def require_safe_shards(recipe: Model, config: Any) -> None:
    """Refuse a folder without weights, and an index that names a missing file, a pickle, or a file in another folder.

    transformers reads every file that the index names.
    """
    name = str(recipe.name_or_path)
    if getattr(config, "transformers_weights", None):  # a file of another name
        return
    with suppress(OSError):  # transformers has a better message for a checkpoint that cannot be reached
        if find_file(recipe, SAFE_WEIGHTS_NAME) is not None:
            return
        if (index := find_file(recipe, SAFE_WEIGHTS_INDEX_NAME)) is not None:
            _require_safe_names(name, index)
        elif Path(name, "config.json").is_file() and not Path(name, "adapter_config.json").is_file():
            raise UsageError(
                f"`model.name_or_path` is {name!r}, which has no weights ({SAFE_WEIGHTS_NAME}); save the model again"
                " with `save_pretrained`"
            )


def _require_safe_names(name: str, index: str) -> None:
    try:
        described = json.loads(Path(index).read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        described = None
    weight_map = described.get("weight_map") if isinstance(described, dict) else None
    if not isinstance(weight_map, dict):
        raise UsageError(
            f"`model.name_or_path` is {name!r}, but its {SAFE_WEIGHTS_INDEX_NAME} has no `weight_map`; save the model"
            " again with `save_pretrained`"
        )
    files = dict.fromkeys(map(str, weight_map.values()))
    if len(files) > _MOST_FILES:  # each is looked up in the hub's cache
        raise UsageError(
            f"`model.name_or_path` is {name!r}, but its {SAFE_WEIGHTS_INDEX_NAME} names {len(files):,} files, but at"
            f" most {_MOST_FILES:,} are allowed; save the model again with `save_pretrained`"
        )
    for file in files:
        if not file.endswith(".safetensors") or "/" in file or "\\" in file:
            raise UsageError(
                f"`model.name_or_path` is {name!r}, but its {SAFE_WEIGHTS_INDEX_NAME} names the file {file!r}, but"
                " only safetensors files of its own folder are allowed; save the model again with `save_pretrained`"
            )
        if Path(name).is_dir() and not Path(name, file).is_file():
            raise UsageError(
                f"`model.name_or_path` is {name!r}, but its file {file!r} is missing, which its"
                f" {SAFE_WEIGHTS_INDEX_NAME} names; copy it too"
            )
