"""Checks of the folders that a run writes to; each is tried, since permissions alone do not tell."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from trainer.base.errors import UsageError
from trainer.doctor.finding import GIB, Finding, ok, problem, size, warning
from trainer.doctor.machine import Machine
from trainer.ranks.environment import cache_folder, user_cache

_LITTLE_BYTES = GIB


def run_folder(machine: Machine) -> Finding:
    """Where checkpoints go: the recipe's `checkpoint.folder`, or `runs/` in the current folder.

    Warning, or a problem with a recipe: it cannot be written. Start elsewhere, or set `checkpoint.folder`.

    Warning: less than 1 GiB is free. Make room.
    """
    try:
        chosen = Path(machine.recipe.checkpoint.folder if machine.recipe else "runs").absolute()
    except OSError as error:
        return problem(f"the current folder cannot be used ({error.strerror})", "change to another folder")
    remedy = "set `checkpoint.folder` to a folder that can be written, or start in one"
    return folder(chosen, remedy, is_needed=machine.recipe is not None)


def data_cache(machine: Machine) -> Finding:
    """Where tokenised texts and resized images are kept: `data.cache`, or `trainer/` in the user's cache.

    Warning, or a problem with a recipe: it cannot be written, or the user has no home. Set `data.cache` or
    `XDG_CACHE_HOME`.
    """
    remedy = "set `data.cache` or XDG_CACHE_HOME to a folder that can be written"
    is_needed = machine.recipe is not None
    if machine.recipe is not None and machine.recipe.data.cache:
        return folder(Path(machine.recipe.data.cache), remedy, is_needed)
    try:
        return folder(cache_folder(machine.environ), remedy, is_needed)
    except UsageError as error:
        return Finding("problem" if is_needed else "warning", str(error).split(";")[0], remedy)


def hub_cache(machine: Machine) -> Finding:
    """Where models and data of the hub are kept: `HF_HOME`, or `huggingface/` in the user's cache.

    Warning: it cannot be written, so that nothing can be downloaded. Set `HF_HOME`. What it holds is used all the
    same.
    """
    remedy = "set HF_HOME to a folder that can be written"
    try:
        return folder(hugging_face_home(machine), remedy, is_needed=False)
    except UsageError as error:
        return warning(str(error).split(";")[0], remedy)


def temporary(machine: Machine) -> Finding:
    """Where temporary files go: `TMPDIR`, or `/tmp`.

    Problem: no such folder can be written. Set `TMPDIR`; in a container with a read-only root, `--tmpfs /tmp`.
    """
    remedy = "set TMPDIR to a folder that can be written; in a container with a read-only root, add `--tmpfs /tmp`"
    try:
        return folder(Path(tempfile.gettempdir()), remedy, is_needed=True)
    except FileNotFoundError:
        return problem("no folder for temporary files can be written", remedy)


def hugging_face_home(machine: Machine) -> Path:
    """As `huggingface_hub` finds it.

    Raises:
        UsageError: nothing says where it is.
    """
    if home := machine.environ.get("HF_HOME"):
        return Path(home)
    return user_cache(machine.environ) / "huggingface"


def folder(path: Path, remedy: str, is_needed: bool) -> Finding:
    """Whether files can be written in a folder, or in the one in which it would be made; leaves nothing behind."""
    try:
        place = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"\0" * 4096)
        free = shutil.disk_usage(place).free
    except OSError as error:
        return Finding("problem" if is_needed else "warning", f"{path} cannot be written: {error.strerror}", remedy)
    if free < _LITTLE_BYTES:
        return warning(f"{path}, {size(free)} free", "make room, or " + remedy)
    return ok(f"{path}, {size(free)} free")
