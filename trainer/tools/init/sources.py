"""The surroundings of a first recipe: the section `data` for a file or a folder, and the devices of this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from trainer.base.errors import UsageError
from trainer.base.file_formats import formats_by_ending
from trainer.data.formats.table import format_of
from trainer.tools.init.columns import IMAGE_ENDINGS

_TRAINING, _VALIDATION = "train", ("validation", "valid", "val", "dev", "eval")
_MOST_FILES = 10_000


def data_keys(source: Path, folder: Path) -> dict[str, Any]:
    """Return the section `data` for a file or a folder, without the held-out share.

    Args:
        folder: the folder of the recipe, the base of its paths.

    Raises:
        UsageError: there is no such file or folder, or its format is unknown.
    """
    if source.is_dir():
        return _of_folder(source, folder)
    if not source.exists():
        raise UsageError(
            f"`{source}` is no file and no folder; for a data set of the hub, fetch it first: hf download --repo-type"
            " dataset NAME --local-dir FOLDER"
        )
    if format_of(source) is None:
        fix = "write each text as an object in a line of a .jsonl file" if source.suffix == ".txt" else "rename it"
        raise UsageError(f"`{source}` must end with one of {', '.join(formats_by_ending())}, perhaps with .gz; {fix}")
    keys: dict[str, Any] = {"source": "files", "train": _place(source, folder)}
    head, found, tail = source.name.rpartition(_TRAINING)
    beside = [source.with_name(f"{head}{word}{tail}") for word in _VALIDATION if found]
    if validation := next((file for file in beside if file.is_file()), None):
        keys["validation"] = _place(validation, folder)
    return keys


def _of_folder(source: Path, folder: Path) -> dict[str, Any]:
    place = _place(source, folder)
    if (source / "dataset_dict.json").is_file() or (source / "state.json").is_file():
        return {"source": "folder", "path": place}
    for number, (_, _, files) in enumerate(os.walk(source)):
        if any(format_of(Path(file)) or file.lower().endswith(IMAGE_ENDINGS) for file in files):
            return {"source": "hub", "name": folder_name(source, folder)}
        if number > _MOST_FILES:
            break
    raise UsageError(
        f"`{source}` holds no file of a known format: {', '.join(formats_by_ending())}, images, or"
        " a folder of `DatasetDict.save_to_disk`; name another folder or a file"
    )


def folder_name(path: Path, folder: Path) -> str:
    """Return a folder as a recipe in `folder` names it where a name on the hub may stand, too."""
    place = _place(path, folder)
    return place if place.startswith((".", "/")) else f"./{place}"


def _place(path: Path, folder: Path) -> str:
    """Return a path as a recipe in `folder` names it: relative if it is inside of it."""
    absolute = os.path.abspath(path)
    inside = os.path.relpath(absolute, os.path.abspath(folder))
    return absolute if inside.startswith("..") else inside


def devices_here() -> str:
    """Return the devices of this machine, as `trainer plan --gpus` takes them."""
    import torch

    from trainer.tools.plan.hardware import device_named

    number = torch.cuda.device_count()
    if not number:
        return "CPU"
    memory = torch.cuda.get_device_properties(0).total_memory
    return f"{number}x{device_named(torch.cuda.get_device_name(), memory) or f'{memory // 2**30}GiB'}"
