"""Durable files: waiting for the disk, and replacing a file or a folder atomically.

A folder may come from someone else: nothing here writes through a link, or reads a pipe or a device as a file.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeVar
from uuid import uuid4

if TYPE_CHECKING:
    from torch import Tensor

Answer = TypeVar("Answer")

_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")
UNFINISHED = ".saving-"
"""Prefix of the name of a file or folder that is still being written; readers ignore it."""
REPLACED = ".replaced-"
"""Prefix of the name of a folder that another one is just replacing."""


def remove(path: Path) -> None:
    """Remove a file or a folder if it exists. A link is removed itself; its target stays.

    Raises:
        OSError: it cannot be removed.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def open_plain(path: Path, flags: int) -> int:
    """Return a descriptor of a regular file, with one name if it is written; `flags` are those of `os.open`.

    Raises:
        OSError: it is a link, a pipe, a device or a folder, or it cannot be opened.
    """
    try:
        # O_NOFOLLOW refuses a link, and O_NONBLOCK does not wait for the other end of a pipe.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise _not_plain(path) from error
    # Asked of the open file: a look at the path before could have seen another one.
    status = os.fstat(descriptor)
    writes = flags & (os.O_WRONLY | os.O_RDWR)
    # A second name of a file may belong to someone else, and a write would change that file.
    if not stat.S_ISREG(status.st_mode) or (writes and status.st_nlink > 1):
        os.close(descriptor)
        raise _not_plain(path)
    return descriptor


def read_plain(path: Path, most_bytes: int | None = None) -> bytes:
    """Return the content of a file that `open_plain` accepts, or its first bytes.

    Raises:
        OSError: see `open_plain`.
    """
    with open(open_plain(path, os.O_RDONLY), "rb") as file:
        return file.read() if most_bytes is None else file.read(most_bytes)


def _not_plain(path: Path) -> OSError:
    return OSError(errno.ELOOP, "it is a link or no regular file; remove it", str(path))


def sync(path: Path) -> None:
    """Wait until the disk has stored a file, or the entries of a folder."""
    # fsync(2) needs no descriptor that writes, and a folder has none.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def numbered_errors() -> Iterator[None]:
    """Raise an OSError for an error of the system in the block: packages in Rust only name its number in a text.

    Raises:
        OSError: a call of the system has failed.
    """
    try:
        yield
    except Exception as error:  # tokenizers has no class of its own
        match = None if isinstance(error, OSError) else _SYSTEM_ERROR.search(str(error))
        if match is None:
            raise
        raise OSError(int(match[1]), os.strerror(int(match[1]))) from error


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file with the permissions that the umask gives; safetensors alone uses 0600.

    Raises:
        OSError, SafetensorError: the file cannot be written.
    """
    from safetensors.torch import save_file  # imports torch, which the other functions do not need

    # The mode of a new file shows the umask, which cannot be read without setting it.
    path.touch()
    mode = path.stat().st_mode
    with numbered_errors():
        save_file(dict(tensors), path, metadata=metadata)
    path.chmod(mode)


def replace_text(path: Path, text: str | Iterable[str], alone: bool = True) -> None:
    """Write a text, perhaps in parts, as `replacing` does."""
    with replacing(path, alone) as file:
        file.writelines([text] if isinstance(text, str) else text)


@contextmanager
def replacing(path: Path, alone: bool = True) -> Iterator[TextIO]:
    """Write a text file atomically: a kill at any moment leaves either the old file or the new one.

    Args:
        alone: whether no other process writes this file. Else each writes a temporary file of its own, which a kill
            leaves behind.

    Raises:
        OSError: it cannot be written; the old file is unchanged.
    """
    new = path.with_name(f"{UNFINISHED}{'' if alone else uuid4().hex}{path.name}")
    remove(new)  # of a process that was killed here, or a link
    try:
        # An exclusive open follows no link, and fails if another process has created the file meanwhile.
        with new.open("x", encoding="utf-8", newline="") as file:
            yield file
        move_over(new, path)
    except BaseException:
        with suppress(OSError):
            remove(new)
        raise


def move_over(new: Path, path: Path) -> None:
    """Put a complete file in the place of `path`, so that a loss of power leaves one of the two."""
    # The content is on the disk before the name shows it, and the entry of the folder before the return.
    sync(new)
    os.replace(new, path)
    sync(path.parent)


def replace_folder(new: Path, place: Path) -> None:
    """Move the folder `new` to `place`, which may exist, once the disk has stored all files of `new`."""
    for path in (*new.rglob("*"), new):
        sync(path)
    aside = place.with_name(f"{REPLACED}{place.name}")
    if not os.path.lexists(place) and os.path.lexists(aside):  # a process was killed between the two renames
        os.rename(aside, place)
    remove(aside)
    # A rename cannot replace a folder with files, so the old one moves aside.
    if os.path.lexists(place):
        os.rename(place, aside)
    try:
        os.rename(new, place)
    except OSError:
        with suppress(OSError):
            os.rename(aside, place)
        raise
    sync(place.parent)
    for _ in range(2):  # the new folder is in its place, and a fault may pass
        with suppress(OSError):
            remove(aside)
            break


def within(seconds: float, question: Callable[[], Answer], otherwise: Answer) -> Answer:
    """Return the answer to a question; `otherwise`: it has failed, or a disk that hangs gives no answer in time."""
    answers: list[Answer] = []
    # A daemon thread, because one that waits for a dead disk would keep the process from ending.
    asker = threading.Thread(target=lambda: answers.append(question()), name="disk", daemon=True)
    asker.start()
    asker.join(seconds)
    return answers[0] if answers else otherwise


FOLDER_FIX = '; for a data set in a folder set `data.source` to "hub", or to "folder" if `save_to_disk` wrote it'
"""The advice for a folder in place of a file of rows."""


def no_file(path: Path) -> str:
    """Return why a path names no file."""
    if path.is_dir():
        return "is a folder"
    return "is a pipe or a device" if path.exists() else "does not exist"
