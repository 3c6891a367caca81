"""The file of a stage in its folder: its training, the run that it began from, and whether it is over."""

from __future__ import annotations

import glob
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.base.disk import replace_text
from trainer.base.errors import UsageError
from trainer.checkpoint.identity import identity
from trainer.observe.metrics_file import STAGE_FILE_NAME
from trainer.recipe.schema import Recipe

_HOW_DATA = ("num_workers", "preparation_processes", "cache", "validation")


def facts_of(recipe: Recipe) -> dict[str, Any]:
    """Return the keys of a stage that change its training, without reading its data: files count by their names."""
    facts = identity(recipe, "")
    data = recipe.data.model_dump(mode="json", exclude=set(_HOW_DATA))
    same: dict[str, Any] = json.loads(json.dumps({**facts, "data": _names(data)}))  # as the file has it
    return same


def facts_of_work(keys: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Return what the result of a work depends on: its keys, task and data, and the sizes of files on this machine."""
    data = recipe.data.model_dump(mode="json", exclude=set(_HOW_DATA) - {"validation"})
    facts = {"work": keys, "task": recipe.task.model_dump(mode="json"), "data": _names(data), "bytes": _sizes(data)}
    same: dict[str, Any] = json.loads(json.dumps(facts))
    return same


def _sizes(value: Any) -> dict[str, int]:
    """Return the sizes of the files that absolute paths and patterns name."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return {name: size for one in inner for name, size in _sizes(one).items()}
    files = glob.glob(value, recursive=True) if isinstance(value, str) and os.path.isabs(value) else []
    return {os.path.basename(file): os.path.getsize(file) for file in sorted(files) if os.path.isfile(file)}


def _names(value: Any) -> Any:
    """Replace absolute paths by their last parts, so that a moved project is no other training."""
    if isinstance(value, dict):
        return {key: _names(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_names(item) for item in value]
    return os.path.basename(value) if isinstance(value, str) and os.path.isabs(value) else value


def read(folder: Path) -> Mapping[str, Any]:
    """Return the content of the file in the folder of a stage; empty: the stage has not begun.

    Raises:
        UsageError: the file is damaged.
    """
    file = folder / STAGE_FILE_NAME
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read: {error}; restore it, or remove {folder}") from error
    if not isinstance(content, dict) or not isinstance(content.get("began_from"), dict):
        raise UsageError(f"{file} must be an object with `began_from`; restore it, or remove {folder}")
    return content


def run_of(folder: Path) -> str | None:
    """Return the word of the run of a stage; None: it is not over."""
    return read(folder).get("run")


def begin(folder: Path, began_from: Mapping[str, str | None]) -> None:
    """Write that a stage has begun from others, by their names and the words that `finish` gave their runs."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder, {"began_from": began_from})


def finish(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write that a stage is over, with a word for this run and the keys of its training or work."""
    _write(folder, {**read(folder), "run": secrets.token_hex(8), "training": facts})


def _write(folder: Path, content: Mapping[str, Any]) -> None:
    replace_text(folder / STAGE_FILE_NAME, json.dumps(content, indent=1) + "\n")
