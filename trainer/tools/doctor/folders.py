"""Checks of the folders that a run writes to, by writing: permissions alone are not enough."""

from __future__ import annotations

import errno
import shutil
import tempfile
from pathlib import Path

from trainer.base.disk import is_in_memory
from trainer.base.errors import UsageError
from trainer.ranks.environment import cache_folder, user_cache
from trainer.tools.doctor.finding import GIB, Finding, bad, ok, problem, size, warning
from trainer.tools.doctor.machine import Machine

_LITTLE_BYTES = GIB


def run_folder(machine: Machine) -> Finding:
    """The folder for checkpoints: `checkpoint.folder` of the recipe, or `runs/` in the current folder."""
    try:
        chosen = Path(machine.recipe.checkpoint.folder if machine.recipe else "runs").absolute()
    except OSError as error:
        return problem(f"the current folder cannot be used ({error.strerror})", "change to another folder")
    remedy = "set `checkpoint.folder` to a writable folder, or start in one"
    return folder(chosen, remedy, is_needed=machine.recipe is not None)


def checkpoint_memory(machine: Machine) -> Finding:
    """With a recipe: `checkpoint.memory.folder`, on each host of the run."""
    memory = machine.recipe.checkpoint.memory if machine.recipe is not None else None
    if memory is None:
        return ok("not in use: the recipe has no `checkpoint.memory`" if machine.recipe else "no recipe is named")
    path = Path(memory.folder)
    if not path.is_dir():
        return problem(f"{path} does not exist", "name a folder of each host in `checkpoint.memory.folder`")
    found = folder(
        path,
        "name a writable folder in `checkpoint.memory.folder`, or set `checkpoint.memory` to null",
        is_needed=True,
        room=f"delete files of dead programs (`ls -l {path}`), or start the container with a larger --shm-size",
    )
    if found.status == "ok" and not is_in_memory(path):
        return warning(f"{found.value}, but on a disk", "name a folder of a memory file system, such as /dev/shm")
    return found


def data_cache(machine: Machine) -> Finding:
    """The folder for tokenised texts and resized images: `data.cache`, or `trainer/` in the user's cache."""
    remedy = "set `data.cache` or XDG_CACHE_HOME to a writable folder"
    is_needed = machine.recipe is not None
    chosen = machine.recipe.data.cache if machine.recipe is not None else None
    try:
        return folder(Path(chosen) if chosen else cache_folder(machine.environ), remedy, is_needed)
    except UsageError as error:
        return bad(str(error).split(";")[0], remedy, is_needed)


def hub_cache(machine: Machine) -> Finding:
    """The folder for models and data of the hub: `HF_HOME`, or `huggingface/` in the user's cache."""
    remedy = "set HF_HOME to a writable folder"
    try:
        return folder(hugging_face_home(machine), remedy, is_needed=False)
    except UsageError as error:
        return warning(str(error).split(";")[0], remedy)


def temporary(machine: Machine) -> Finding:
    """The folder for temporary files: `TMPDIR`, or `/tmp`."""
    remedy = "set TMPDIR to a writable folder; in a container with a read-only root, add `--tmpfs /tmp`"
    try:
        used = Path(tempfile.gettempdir())
    except FileNotFoundError:
        return problem("no folder for temporary files can be written", remedy)
    asked = Path(machine.environ.get("TMPDIR") or "/tmp")
    found = folder(asked, remedy, is_needed=False)
    if found.status == "ok" or used == asked:
        return folder(used, remedy, is_needed=True)
    return warning(f"{found.value}; {used} is used instead", f"make room, or {remedy}")


def hugging_face_home(machine: Machine) -> Path:
    """Return the folder that `huggingface_hub` uses.

    Raises:
        UsageError: the user has no home, and no variable names a folder.
    """
    if home := machine.environ.get("HF_HOME"):
        return Path(home)
    return user_cache(machine.environ) / "huggingface"


def folder(path: Path, remedy: str, is_needed: bool, room: str | None = None) -> Finding:
    """Check that a folder, or its nearest existing parent, is writable; leave no file behind.

    Args:
        remedy: the remedy for a folder that cannot be written.
        is_needed: whether this is a problem, not a warning.
        room: the remedy for a full folder; None: free some space, or `remedy`.
    """
    room = room or f"free some space, or {remedy}"
    try:
        place = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"\0" * 4096)
        free = shutil.disk_usage(place).free
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return bad(f"{path} cannot be written: {error.strerror}", room if is_full else remedy, is_needed)
    if free < _LITTLE_BYTES:
        return warning(f"{path}, {size(free)} free", room)
    return ok(f"{path}, {size(free)} free")
