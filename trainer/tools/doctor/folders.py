"""Checks of the folders that a run writes to; on a disk by writing, because permissions alone are not enough."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

from trainer.base.errors import UsageError
from trainer.ranks.environment import cache_folder
from trainer.tools.doctor.finding import GIB, MIB, Finding, ok, problem, size, warning
from trainer.tools.doctor.machine import Machine

_LITTLE_BYTES = GIB
_LEAST_SHARED_BYTES = GIB
_LEAST_FREE_SHARED_BYTES = 256 * MIB


def run_folder(machine: Machine) -> Finding:
    """The folder for checkpoints, `runs/` in the current folder; a recipe may name another."""
    try:
        chosen = Path("runs").absolute()
    except OSError as error:
        return problem(f"the current folder cannot be used ({error.strerror})", "change to another folder")
    return folder(chosen, "set `checkpoint.folder` to a writable folder, or start in one")


def data_cache(machine: Machine) -> Finding:
    """The folder for tokenised texts and resized images, `trainer/` in the user's cache; a recipe may name another."""
    remedy = "set `data.cache` or XDG_CACHE_HOME to a writable folder"
    try:
        return folder(cache_folder(machine.environ), remedy)
    except UsageError as error:
        return warning(str(error).split(";")[0], remedy)


def folder(path: Path, remedy: str) -> Finding:
    """Check that a folder, or its nearest existing parent, is writable; leave no file behind.

    Args:
        remedy: the remedy for a folder that cannot be written.
    """
    room = f"free some space, or {remedy}"
    try:
        place = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
        with tempfile.TemporaryFile(dir=place) as file:
            # A full disk often still takes an empty file, but no content.
            file.write(b"\0" * 4096)
        free = shutil.disk_usage(place).free
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return warning(f"{path} cannot be written: {error.strerror}", room if is_full else remedy)
    if free < _LITTLE_BYTES:
        return warning(f"{path}, {size(free)} free", room)
    return ok(f"{path}, {size(free)} free")


def shared_memory(machine: Machine) -> Finding:
    """`/dev/shm`, which data loaders and NCCL use between processes."""
    place = machine.path("/dev/shm")
    if not place.is_dir():
        return ok("there is no /dev/shm on this system")
    more = "start the container with --shm-size=8g or --ipc=host (Kubernetes: an emptyDir of medium Memory there)"
    if not os.access(place, os.W_OK):
        return problem("/dev/shm cannot be written", more)
    status = os.statvfs(place)
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    value = f"{size(total)}, {size(free)} free"
    if total < _LEAST_SHARED_BYTES:
        return warning(value, more)
    if free < _LEAST_FREE_SHARED_BYTES:
        return warning(value, "delete the files of dead programs: see `ls -l /dev/shm`")
    return ok(value)
