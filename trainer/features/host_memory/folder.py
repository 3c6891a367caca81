"""The folder of a run's checkpoints in the memory of one host.

Each rank writes its share into a folder of a memory file system. The files of a share are those of a checkpoint:

- `trainer-USER-RUN/KEY/host`: the random name of this host. If another user has that folder, `trainer-USER-RUN-1`.
- `trainer-USER-RUN/KEY/rank-00001-of-00004/checkpoints/step-00000120/`: the share of rank 1 of 4.

A checkpoint is complete when the share of each rank is on some host. Only a complete one replaces an earlier one.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import psutil

from trainer.base import cgroup
from trainer.base.disk import open_plain, read_plain, remove
from trainer.checkpoint.store import CheckpointStore

_PLACE = re.compile(r"rank-([0-9]{5,9})-of-([0-9]{5,9})")
HOST = "host"
"""The file with the random name of a host."""
KEPT = 2
"""Checkpoints in memory: the newest complete one, and the one before or the next."""
_HOST_BYTES = 8


def folder_of_run(folder: Path, run_folder: Path) -> Path:
    """Return the folder of a run's checkpoints in memory, or a free place for it.

    Any user may create a folder there, so one that another user has, or may write to, is skipped.
    """
    run = hashlib.sha256(os.fsencode(run_folder.absolute())).hexdigest()[:16]
    name = f"trainer-{os.getuid()}-{run}"
    folder = folder.absolute()
    taken: set[str] = set()
    with suppress(OSError):  # `claim` will raise it
        taken = {one for one in os.listdir(folder) if one.startswith(name)}
    # The first of several in order of their names, so that all ranks of a host choose the same.
    own = min((one for one in taken if _is_own(folder / one)), default=None)
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(1)))
    return folder / (own or next(one for one in names if one not in taken))


def _is_own(folder: Path) -> bool:
    """Return whether this user alone may write to a folder."""
    try:
        # Not `stat`, because a link of another user could lead to a folder of this one.
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def room_in(folder: Path) -> tuple[int, str]:
    """Return the free bytes of a folder and the place; in memory, those of host or control group if these have less.

    The pages of a memory file system count towards the limit of the control group.
    """
    room = [(shutil.disk_usage(folder).free, "in the folder")]
    if is_in_memory(folder):
        room.append((psutil.virtual_memory().available, "in the memory of the host"))
        if (of_group := cgroup.free_memory_bytes()) is not None:
            room.append((of_group, "in the control group"))
    # The smallest room counts, and messages show its place.
    return min(room)


def claim(folder: Path) -> None:
    """Create the folder that `folder_of_run` has named.

    Raises:
        OSError: it cannot be created, or belongs to another user.
    """
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _is_own(folder):
        raise PermissionError(f"{folder} belongs to another user, or others may write to it")


def begin_share(folder: Path, place: CheckpointStore, step: int) -> None:
    """Create the folder of a run and the temporary folder of a share in it.

    Raises:
        OSError: one cannot be created, or that of the run belongs to another user.
    """
    claim(folder)
    place.folder.mkdir(parents=True, exist_ok=True)
    place.begin(step)


def remove_unused(folder: Path, kept: str | None = None) -> None:
    """Remove the checkpoints of a run's folder in memory that no process of this host uses, but those of a key."""
    with suppress(FileNotFoundError):
        for root in folder.iterdir():
            if root.name != kept and not is_used(root):
                with suppress(OSError):
                    remove(root)
    with suppress(OSError):  # another run of this path, in another container, may use it
        folder.rmdir()


def enter(root: Path) -> tuple[str, BinaryIO]:
    """Create the folder of a run's key, and remove those of unused keys.

    Returns:
        The name of this host, and the open file with the lock that keeps other runs from removing the folder.

    Raises:
        OSError: it cannot be created.
    """
    claim(root.parent)
    root.mkdir(exist_ok=True)
    remove_unused(root.parent, root.name)
    draft = root / f".{HOST}-{secrets.token_hex(8)}"
    # The name is complete before the link shows it, so no other rank reads a part of it.
    draft.write_text(secrets.token_hex(_HOST_BYTES))
    with suppress(FileExistsError):
        os.link(draft, root / HOST)  # the first rank names the host
    draft.unlink()
    lock = os.fdopen(open_plain(root / HOST, os.O_RDONLY), "rb")
    # All ranks of a run share the lock. Another run tests it by an exclusive one, in `is_used`.
    fcntl.flock(lock, fcntl.LOCK_SH)
    return host_name(root), lock


def place_of(rank: int, size: int) -> str:
    """Return the name of the folder of a rank's shares."""
    return f"rank-{rank:05d}-of-{size:05d}"


def host_name(root: Path) -> str:
    """Return the random name of a host from the folder of a run's key.

    Raises:
        OSError: its file is missing or damaged.
    """
    content = read_plain(root / HOST, 2 * _HOST_BYTES + 1)
    if not re.fullmatch(rb"[0-9a-f]{%d}" % (2 * _HOST_BYTES), content):
        raise OSError(errno.EINVAL, "it is damaged; remove its folder", str(root / HOST))
    return content.decode()


def held_in(root: Path) -> dict[str, list[int]]:
    """Return the steps of the shares in a folder of this host, by the name of their place."""
    held = {}
    for place in places(root):
        store = CheckpointStore(place, KEPT)
        for folder in (place, store.folder):
            if folder.is_symlink() or not folder.is_dir():  # it holds no share, and would be in the way of the next
                remove(folder)
        store.open()
        held[place.name] = store.steps()
    return held


def complete_in(held: Iterable[tuple[int, Mapping[str, Sequence[int]]]]) -> dict[tuple[int, int], dict[int, list[int]]]:
    """Return the holders of each share of the complete checkpoints, by step and number of ranks.

    Args:
        held: numbers of holders, each with the steps of its shares by the name of their place, as `held_in` returns.
    """
    holders: dict[tuple[int, int], dict[int, list[int]]] = {}
    for holder, places in held:
        for name, steps in places.items():
            part, size = map(int, re.findall("[0-9]+", name))
            for step in steps:
                holders.setdefault((step, size), {}).setdefault(part, []).append(holder)
    # A name may claim any number of ranks, so it makes no range.
    return {key: parts for key, parts in holders.items() if len(parts) == key[1] and max(parts) < key[1]}


def places(root: Path) -> list[Path]:
    """Return the folders of ranks' shares."""
    if not root.is_dir():  # a cleaner of the memory file system has removed it
        return []
    return [place for place in root.iterdir() if _PLACE.fullmatch(place.name)]


def is_used(root: Path) -> bool:
    """Return whether a run on this host uses the checkpoints in a folder."""
    try:
        with open(open_plain(root / HOST, os.O_RDONLY), "rb") as host:
            # Closing the file ends the lock at once, so this only asks.
            fcntl.flock(host, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (FileNotFoundError, NotADirectoryError):  # no run has opened it
        return False
    return False


def is_in_memory(folder: Path) -> bool:
    """Return whether a folder is on a memory file system."""
    import psutil

    folder = folder.resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if folder.is_relative_to(part.mountpoint)]
    # The longest of these mount points is the innermost.
    return bool(mounts) and max(mounts, key=lambda part: len(part.mountpoint)).fstype in ("tmpfs", "ramfs")
