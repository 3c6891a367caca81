"""A lock on a file, with a record of the process that owns it.

The lock is a POSIX record lock (`fcntl(2)`, `F_SETLK`). The kernel, or the NFS server, releases it at any end of its
process, so a killed process leaves no lock behind. Child processes do not inherit it. It also ends when its process
closes another descriptor of the file, so a process uses one `OwnedLock` for a file.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.base.disk import open_plain, read_plain
from trainer.base.processes import start_of, this_machine

UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""The error numbers of a file system without locks."""

_LARGEST_BYTES = 65536
_HELD = {errno.EACCES, errno.EAGAIN}


@dataclass(frozen=True)
class Owner:
    """The process that owns a lock, and the time since when.

    `machine` identifies the running system and its process numbers, also among containers of one host. `started` is the
    start of the process in clock ticks: a later process may get the same number. Both are empty where unknown.
    """

    host: str
    pid: int
    since: str
    machine: str
    started: str

    @classmethod
    def this_process(cls) -> Owner:
        """Return the record of this process."""
        now = time.strftime("%Y-%m-%d %H:%M:%S %z")
        return cls(socket.gethostname(), os.getpid(), now, this_machine(), start_of(os.getpid()))

    def has_ended(self) -> bool | None:
        """Return whether the process has ended; None if it ran on another machine, or that is unknown."""
        if not self.machine or self.machine != this_machine():
            return None
        return start_of(self.pid) != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host[:100]!r} since {self.since[:40]!r}"


class OwnedLock:
    """A lock of this process on a file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._descriptor: int | None = None

    def take(self, wait_seconds: float = 0.0) -> bool:
        """Take the lock and write the record; returns False if another process still has it after `wait_seconds`.

        Raises:
            OSError: the file cannot be written, or the file system has no locks (`UNSUPPORTED`).
        """
        end = time.monotonic() + wait_seconds
        while not self._try_take():
            if time.monotonic() >= end:
                return False
            time.sleep(0.2)
        return True

    def _try_take(self) -> bool:
        # Opened anew at each attempt, because the previous owner removes the file.
        descriptor = open_plain(self.file, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self._is_the_file(descriptor):  # the previous owner removed it between `open` and `lockf`
                os.close(descriptor)
                return False
            # Through this descriptor, because closing another one of the file would release the lock.
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(asdict(Owner.this_process())).encode(), 0)
        except OSError as error:
            os.close(descriptor)
            if error.errno in _HELD:
                return False
            raise
        self._descriptor = descriptor
        return True

    def was_removed(self) -> bool:
        """Return whether someone has removed the file of the lock that this process holds."""
        return self._descriptor is not None and not self._is_the_file(self._descriptor)

    def owner(self) -> Owner | None:
        """Return the owner by the record, or None if it cannot be read."""
        try:
            if self._descriptor is None:
                content = read_plain(self.file, _LARGEST_BYTES)
            else:  # closing the file would release the lock
                content = os.pread(self._descriptor, _LARGEST_BYTES, 0)
            record = json.loads(content)
            texts = {name: str(record[name]) for name in ("host", "since", "machine", "started")}
            return Owner(pid=int(record["pid"]), **texts)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def is_held(self) -> bool:
        """Return whether another process has the lock; creates no file.

        Raises:
            OSError: the file exists but cannot be opened, or the file system has no locks.
        """
        try:
            # Open for writing, because fcntl(2) gives no exclusive lock on a descriptor that only reads.
            descriptor = open_plain(self.file, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                return True
            raise
        finally:
            os.close(descriptor)
        return False

    def release(self) -> None:
        """Remove the file and the lock."""
        if self._descriptor is not None:
            # Removed while the lock is held. Afterwards, the file could be that of the next owner.
            if not self.was_removed():
                with suppress(OSError):
                    self.file.unlink()
            os.close(self._descriptor)
            self._descriptor = None

    def _is_the_file(self, descriptor: int) -> bool:
        try:
            # By inode, because another file may have the name by now.
            return os.path.samestat(os.fstat(descriptor), os.stat(self.file))
        except FileNotFoundError:
            return False
