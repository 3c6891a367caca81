"""Durable files: waiting for the disk, and replacing a file or a folder atomically."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

UNFINISHED = ".saving-"
"""Prefix of the name of a file or folder that is still being written; readers ignore it."""


def sync(path: Path) -> None:
    """Wait until the disk has stored a file, or the entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file with the permissions that the umask gives; safetensors alone uses 0600.

    Raises:
        OSError, SafetensorError: the file cannot be written.
    """
    from safetensors.torch import save_file  # imports torch, which the other functions do not need

    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata=metadata)
    path.chmod(mode)


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically: a kill at any moment leaves either the old file or the new one."""
    new = path.with_name(f"{UNFINISHED}{path.name}")
    new.write_text(text, encoding="utf-8", newline="")
    sync(new)
    os.replace(new, path)
    sync(path.parent)


def replace_folder(new: Path, place: Path) -> None:
    """Move the folder `new` to `place`, which may exist, once the disk has stored all files of `new`."""
    for path in (*new.rglob("*"), new):
        sync(path)
    aside = place.with_name(f".replaced-{place.name}")
    shutil.rmtree(aside, ignore_errors=True)
    if place.exists():
        os.rename(place, aside)
    os.rename(new, place)
    sync(place.parent)
    shutil.rmtree(aside, ignore_errors=True)


def is_in_memory(folder: Path) -> bool:
    """Return whether a folder is on a memory file system."""
    import psutil

    folder = folder.resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if folder.is_relative_to(part.mountpoint)]
    return bool(mounts) and max(mounts, key=lambda part: len(part.mountpoint)).fstype in ("tmpfs", "ramfs")
