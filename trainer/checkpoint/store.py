"""The checkpoints in a run's folder: `checkpoints/step-00000120/`, and `checkpoints/latest`, which names the newest.

A checkpoint is written into a temporary folder, synced, and renamed, so that a kill at any moment leaves a complete one
or none; another of the same step gives way only then, and nothing older goes before.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from trainer.base.disk import UNFINISHED, replace_text, sync
from trainer.checkpoint.files import Facts, WrittenFile, seal

_FOLDER_NAME = re.compile(r"step-([0-9]{8,})")
_REPLACED, _REMOVED, _LATEST = ".replaced-", ".removed-", "latest"
_MARKER = ".seen-"

FOLDER_SECONDS = 60.0
"""How long a machine may take to see what another one wrote: that long, NFS keeps what it knew of a folder."""


class CheckpointStore:
    """The checkpoints of one run. Rank 0 makes, completes and removes them; every rank writes its file.

    Args:
        folder: of the run.
        keep: how many checkpoints stay; the oldest go first.
        seconds: how long a file of rank 0 may take to be seen by another rank.
    """

    def __init__(self, folder: Path, keep: int, seconds: float = FOLDER_SECONDS) -> None:
        self.folder = folder / "checkpoints"
        self._keep = keep
        self._seconds = seconds

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, oldest first."""
        matches = (_FOLDER_NAME.fullmatch(path.name) for path in self.folder.glob("step-*") if path.is_dir())
        return sorted(int(match[1]) for match in matches if match)

    def path(self, step: int) -> Path:
        """Where a complete checkpoint lies."""
        return self.folder / f"step-{step:08d}"

    def unfinished_path(self, step: int) -> Path:
        """Where a checkpoint lies while it is written."""
        return self.folder / f"{UNFINISHED}{self.path(step).name}"

    def open(self) -> None:
        """Makes the folder, and finishes what a kill has left half done.

        Raises:
            OSError: it cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for aside in self.folder.glob(f"{_REPLACED}*"):
            final = self.folder / aside.name.removeprefix(_REPLACED)
            if not final.exists():  # killed between the two renames of `complete`
                os.rename(aside, final)
        self._remove_leftovers()

    def make_marker(self) -> str:
        """Makes a file by which others tell that they see this folder; gives its name.

        Raises:
            OSError: it cannot be made.
        """
        name = f"{_MARKER}{secrets.token_hex(8)}"
        (self.folder / name).touch()
        return name

    def sees(self, marker: str) -> bool:
        """Whether that file is here, or comes in the time that a network's file system may take to show it."""
        end = time.monotonic() + self._seconds
        while not os.path.isdir(self.folder) or marker not in os.listdir(self.folder):
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
        return True

    def remove_marker(self, marker: str) -> None:
        """Removes that file; one that stays goes with what else was left over."""
        with suppress(OSError):
            (self.folder / marker).unlink()

    def begin(self, step: int) -> Path:
        """Makes the folder that the ranks write into; it is not made anew where the run's folder has gone.

        Raises:
            OSError: it cannot be made.
        """
        self._remove_leftovers()
        temporary = self.unfinished_path(step)
        temporary.mkdir()
        return temporary

    def complete(self, facts: Facts, files: Iterable[WrittenFile]) -> Path:
        """Makes what was written a checkpoint, then removes those that are no longer needed.

        These are the oldest beyond `keep`, but not that of the best evaluation; and any of a later step: the run went
        on from before it, because it was damaged, so it would now belong to another past.

        Raises:
            OSError: it cannot be written; the checkpoints before it are as they were.
        """
        step = facts.progress.step
        temporary, final = self.unfinished_path(step), self.path(step)
        seal(temporary, facts, files)
        aside = self.folder / f"{_REPLACED}{final.name}"
        if final.exists():
            os.rename(final, aside)
        try:
            os.rename(temporary, final)
        except OSError:
            with suppress(OSError):
                os.rename(aside, final)
            raise
        sync(self.folder)
        replace_text(self.folder / _LATEST, f"{final.name}\n")
        best = facts.progress.best
        self._rotate(step, best.step if best else None)
        return final

    def discard(self, step: int) -> None:
        """Removes what was written of a checkpoint that cannot be completed, as far as that goes."""
        shutil.rmtree(self.unfinished_path(step), ignore_errors=True)

    def name_of_last(self) -> str:
        """For messages."""
        steps = self.steps()
        return f"that of step {steps[-1]}" if steps else "none"

    def _rotate(self, step: int, best: int | None) -> None:
        steps = self.steps()
        kept = {*[other for other in steps if other <= step][-self._keep :], *({best} if best is not None else ())}
        for other in set(steps) - kept:
            with suppress(OSError):  # a checkpoint too many does no harm
                # Renamed first: one that is removed half-way must not look like one that was damaged.
                os.rename(self.path(other), self.folder / f"{_REMOVED}{self.path(other).name}")
        with suppress(OSError):
            self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """What no name leads to any more; another checkpoint of the step stands where one was replaced."""
        for mark in (UNFINISHED, _REPLACED, _REMOVED, _MARKER):
            for path in self.folder.glob(f"{mark}*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
