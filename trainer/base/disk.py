"""What a file system needs to be told: when to have a file, how to put a file or a folder in the place of another."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

UNFINISHED = ".saving-"
"""How the name of a file or folder begins that is not whole yet, and so is nobody's."""


def sync(path: Path) -> None:
    """Waits until the disk has a file, or the names in a folder.

    Raises:
        OSError: it has not.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Writes safetensors with the permissions of any other file; by itself the library lets only the owner read.

    Raises:
        OSError, SafetensorError: the file cannot be written.
    """
    from safetensors.torch import save_file  # here, because it brings torch, and text needs none

    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata=metadata)
    path.chmod(mode)


def replace_text(path: Path, text: str) -> None:
    """Writes a whole file such that a kill at any moment leaves the old one or the new one.

    Raises:
        OSError: it cannot be written; the old one stays.
    """
    new = path.with_name(f"{UNFINISHED}{path.name}")
    new.write_text(text, encoding="utf-8", newline="")
    sync(new)
    os.replace(new, path)
    sync(path.parent)


def replace_folder(new: Path, place: Path) -> None:
    """Puts a folder of files in the place of another, when the disk has all of it.

    Raises:
        OSError: it cannot.
    """
    for path in (*new.iterdir(), new):
        sync(path)
    aside = place.with_name(f".replaced-{place.name}")
    shutil.rmtree(aside, ignore_errors=True)
    if place.exists():
        os.rename(place, aside)
    os.rename(new, place)
    sync(place.parent)
    shutil.rmtree(aside, ignore_errors=True)
