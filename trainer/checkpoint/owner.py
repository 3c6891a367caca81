"""The lock on a run's folder: one run at a time writes checkpoints and metrics there.

The lock is a POSIX record lock (`fcntl(2)`, `F_SETLK`) on `.owner.json`. The kernel, or the NFS server, releases it at
any end of its process, so a killed run leaves no lock behind. Child processes do not inherit it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from trainer.base.errors import TrainerError, UsageError

OWNER_FILE = ".owner.json"
WAIT_SECONDS = 15.0
"""The time that a start waits for the previous owner, since a restarted rank can start before the old one ends."""

_HELD = {errno.EACCES, errno.EAGAIN}
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class FolderOwner:
    """The ownership of one run folder by the process of rank 0; a context manager that releases it.

    Args:
        folder: the run folder, which `take` creates.
        wait_seconds: the time that `take` waits for another owner to end.
    """

    def __init__(self, folder: Path, wait_seconds: float = WAIT_SECONDS) -> None:
        self._file = folder / OWNER_FILE
        self._wait_seconds = wait_seconds
        self._descriptor: int | None = None

    def take(self) -> str | None:
        """Lock the folder for this process.

        Returns:
            A note if the file system has no locks, which leaves the folder unprotected; else None.

        Raises:
            TrainerError: another process holds the lock.
            UsageError: the folder cannot be written.
        """
        end = time.monotonic() + self._wait_seconds
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            while not self._try():
                if time.monotonic() > end:
                    raise TrainerError(
                        f"`checkpoint.folder` {self._file.parent} is in use by another run ({_described(self._file)});"
                        " wait for its end, stop it, or give this run a folder of its own"
                    )
                time.sleep(0.2)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return (
                    f"the file system of {self._file.parent} has no locks ({error.strerror}):"
                    " do not start a second run in this folder"
                )
            raise UsageError(
                f"`checkpoint.folder` must be a folder that can be written, but {self._file.parent} is not"
                f" ({error.strerror}); change its permissions or choose another"
            ) from error
        return None

    def _try(self) -> bool:
        descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous owner may have removed the file between `open` and `lockf`.
            if not os.path.exists(self._file) or not os.path.samestat(os.fstat(descriptor), os.stat(self._file)):
                os.close(descriptor)
                return False
            record = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": _now()})
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, record.encode(), 0)
        except OSError as error:
            os.close(descriptor)
            if error.errno in _HELD:
                return False
            raise
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Remove the file and the lock."""
        if self._descriptor is not None:
            with suppress(OSError):
                self._file.unlink()
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> FolderOwner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z")


def _described(file: Path) -> str:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        return f"process {int(record['pid'])} on {str(record['host'])[:100]!r} since {str(record['since'])[:40]!r}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"its {file.name} cannot be read"
