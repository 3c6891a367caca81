"""Files of a pretrained model, in a folder or in a repository of the hub: their names, limits and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import shorten
from typing import Any

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file, is_peft_available
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import get_checkpoint_shard_files

from trainer.base.errors import TrainerError, UsageError, causes, storage_error
from trainer.recipe.schema import Model

_MOST_FILES = 10_000
_LARGEST_BYTES = 1 << 28  # the largest tokenizers have some 40 MB
_WHOLE_FILES = (
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "config.json", "generation_config.json",
    "merges.txt", "model.safetensors.index.json", "preprocessor_config.json", "processor_config.json",
    "sentencepiece.bpe.model", "special_tokens_map.json", "spiece.model", "spm.model", "tokenizer.json",
    "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
)  # fmt: skip

CANNOT_READ = (
    OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RecursionError, StrictDataclassError,
)  # fmt: skip
"""Errors of transformers for configurations and tokenizers that it cannot read; values have any type."""


def one_line(error: Exception) -> str:
    """Return the message of an error of transformers on one line of at most 300 characters."""
    text = f"no {error}" if isinstance(error, KeyError) else str(error)
    return shorten(text, 300, placeholder=" ...") or type(error).__name__


def not_found(key: str, name: str, error: Exception) -> TrainerError:
    """Return the error for a folder or repository, named by the recipe's `key`, that could not be opened."""
    # transformers wraps the error of the disk, which has the path and the real reason.
    for cause in (error, *causes(error)):
        if not isinstance(cause, OSError) or isinstance(cause, FileNotFoundError):
            continue
        if str(cause.filename or "").startswith(constants.HF_HUB_CACHE):
            return storage_error(
                f"the hub's cache must be a folder that can be used, but {cause.filename} cannot ({cause.strerror});"
                " make room, restore its permissions, or set HF_HOME to another folder",
                cause,
            )
    return UsageError(
        f"`{key}` is {name!r}, which could not be opened: {one_line(error)}; give a folder that holds it, or the name"
        " of a repository that this machine can reach or has in its cache"
    )


def require_small_files(key: str, name: str, revision: str | None) -> None:
    """Refuse a file that transformers reads as a whole and that may exceed the memory, in a folder or in the cache."""
    for file in _WHOLE_FILES:
        path = Path(name, file)
        with suppress(HFValidationError):  # transformers has a better message
            if not Path(name).is_dir() and isinstance(
                cached := try_to_load_from_cache(name, file, revision=revision), str
            ):
                path = Path(cached)
        if path.is_file() and path.stat().st_size > _LARGEST_BYTES:
            raise UsageError(
                f"`{key}` is {name!r}, which has a {file} of {path.stat().st_size:,} bytes, but may have at most"
                f" {_LARGEST_BYTES:,}; copy the file of the model again"
            )


class CannotLoadPartsError(Exception):
    """Error for a model that must be built whole before it is cut; the message completes "because ..."."""


def find_file(recipe: Model, file: str) -> str | None:
    """Return the path of a file of a model's folder or of the hub; None if it has no such file.

    Raises:
        OSError: the hub cannot be reached.
    """
    path: str | None = cached_file(
        str(recipe.name_or_path), file, revision=recipe.revision or "main", _raise_exceptions_for_missing_entries=False
    )
    return path


def is_adapter(recipe: Model) -> bool:
    """Return whether a folder or a name on the hub is an adapter to another model, which is ignored without PEFT.

    Raises:
        OSError: the hub cannot be reached.
    """
    return is_peft_available() and find_file(recipe, "adapter_config.json") is not None


def pretrained_files(recipe: Model, config: Any) -> list[str]:
    """Return the safetensors files of a folder or of the hub: one file, or several files with an index.

    Raises:
        CannotLoadPartsError: the weights lie elsewhere, or in another form.
    """
    for attribute, what in (
        ("quantization_config", "its weights are quantised"),
        ("transformers_weights", "its configuration names a file of weights of its own"),
        ("extra_files", "weights lie in further files"),
    ):
        if getattr(config, attribute, None):
            raise CannotLoadPartsError(what)
    name, revision = str(recipe.name_or_path), recipe.revision or "main"
    try:
        if is_adapter(recipe):
            raise CannotLoadPartsError("it is an adapter to another model")
        # One file first, as in transformers: a folder may have both.
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
    # The map names a file for each tensor, so each file is in it many times.
    files = dict.fromkeys(map(str, weight_map.values()))
    if len(files) > _MOST_FILES:  # each is looked up in the hub's cache
        raise UsageError(
            f"`model.name_or_path` is {name!r}, but its {SAFE_WEIGHTS_INDEX_NAME} names {len(files):,} files, and at"
            f" most {_MOST_FILES:,} are allowed; save the model again with `save_pretrained`"
        )
    for file in files:
        # A pickle can run code, and a path could lead out of the folder.
        if not file.endswith(".safetensors") or "/" in file or "\\" in file:
            raise UsageError(
                f"`model.name_or_path` is {name!r}, but its {SAFE_WEIGHTS_INDEX_NAME} names the file {file!r}, and"
                " only safetensors files of its own folder are allowed; save the model again with `save_pretrained`"
            )
        if Path(name).is_dir() and not Path(name, file).is_file():
            raise UsageError(
                f"`model.name_or_path` is {name!r}, but its file {file!r} is missing, which its"
                f" {SAFE_WEIGHTS_INDEX_NAME} names; copy it too"
            )


@contextmanager
def without_report() -> Iterator[None]:
    """Hide the report and the bar of transformers for a load, one for each rank: notes of the build say the same."""
    verbosity, had_bar = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bar:
            transformers_logging.enable_progress_bar()
