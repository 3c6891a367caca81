"""The lock on a run's folder: one run at a time writes checkpoints and metrics there."""

from __future__ import annotations

from pathlib import Path

from trainer.base.errors import TrainerError, UsageError, storage_error
from trainer.base.logging_targets import logging_targets
from trainer.base.owned_lock import UNSUPPORTED, OwnedLock

OWNER_FILE = ".owner.json"
WAIT_SECONDS = 15.0
"""The time that a start waits for the previous owner, since a restarted rank can start before the old one ends."""


def written_through() -> list[str]:
    """Return the entries of a run's folder that a link could lead elsewhere; all others are replaced."""
    of_targets = (name for target in logging_targets().values() for name in target.writes)
    return sorted({"checkpoints", "ranks", *of_targets})


def require_no_link(place: Path) -> None:
    """Refuse a link at a place in a run's folder.

    Raises:
        UsageError: there is one.
    """
    if place.is_symlink():
        raise UsageError(
            f"`checkpoint.folder` must hold no link where the run writes, but {place} leads to"
            f" {str(place.readlink())!r}; remove the link, or name a folder on that disk"
        )


class FolderOwner:
    """The ownership of one run folder by the process of rank 0; a context manager that releases it."""

    def __init__(self, folder: Path, wait_seconds: float = WAIT_SECONDS) -> None:
        self._lock = OwnedLock(folder / OWNER_FILE)
        self._folder = folder
        self._wait_seconds = wait_seconds

    def take(self) -> str | None:
        """Lock the folder for this process.

        Returns:
            A note if the file system has no locks, which leaves the folder unprotected; else None.

        Raises:
            TrainerError: another process holds the lock, or the disk is full.
            UsageError: the folder cannot be written, or a link stands where the run would write.
        """
        for place in (self._folder / name for name in written_through()):
            require_no_link(place)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not self._lock.take(self._wait_seconds):
                raise TrainerError(self._in_use())
        except OSError as error:
            # The run goes on, since some network file systems have no locks, and the note names the danger.
            if error.errno in UNSUPPORTED:
                return (
                    f"the file system of {self._folder} has no locks ({error.strerror}):"
                    " do not start a second run in this folder"
                )
            raise storage_error(
                f"`checkpoint.folder` must be a folder that can be written, but {self._folder} is not"
                f" ({error.strerror}); make room, change its permissions or choose another",
                error,
            ) from error
        return None

    def check(self) -> None:
        """Check that the folder still belongs to this run.

        Raises:
            TrainerError: someone removed the folder, or the file of the lock, so that another run may own the folder.
        """
        if self._lock.was_removed():
            if not self._folder.exists():
                raise TrainerError(f"the run folder {self._folder} was removed; restore it, then start the run again")
            raise TrainerError(
                f"{self._lock.file} was removed, so another run may write to {self._folder}; this run stops without"
                " saving, and its checkpoints stay as they are"
            )

    def _in_use(self) -> str:
        owner, file = self._lock.owner(), self._lock.file
        if owner is None:
            return (
                f"`checkpoint.folder` {self._folder} is in use by another run (its {file.name} cannot be read); wait"
                " for its end, or give this run a folder of its own"
            )
        begun = f"`checkpoint.folder` {self._folder} is in use by another run ({owner})"
        take_over = f"delete {file}, which releases its lock"
        if owner.has_ended():
            return f"{begun}; its process has ended, but the file server still holds its lock: {take_over}"
        remedy = f"{begun}; wait for its end, stop it, or give this run a folder of its own"
        if owner.has_ended() is None:
            remedy += f". If that machine is gone for good, {take_over}; a run that still runs stops at its next save"
        return remedy

    def __enter__(self) -> FolderOwner:
        return self

    def __exit__(self, *exception: object) -> None:
        self._lock.release()
