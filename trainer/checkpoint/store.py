"""The checkpoints in a run's folder: `checkpoints/step-00000120/`; `checkpoints/latest` names the newest.

A checkpoint is written into a temporary folder, synced and renamed. A kill at any moment therefore leaves a complete
checkpoint or none. The rename comes before older checkpoints are removed.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.base.disk import REPLACED, UNFINISHED, read_plain, remove, replace_folder, replace_text
from trainer.base.errors import storage_error
from trainer.base.waiting import wait_until
from trainer.checkpoint.format import Facts, WrittenFile, seal
from trainer.checkpoint.names import saved_steps

_REMOVED, _LATEST = ".removed-", "latest"
_MARKER, _MEMORY_KEY = ".seen-", "memory-key"
_KEY_BYTES = 8
_KEY = re.compile(rb"[0-9a-f]{%d}" % (2 * _KEY_BYTES))

FOLDER_SECONDS = 60.0
"""The longest time until a machine sees the files of another one, since NFS caches the entries of a folder."""


def folder_name(step: int) -> str:
    """Return the name of the folder of a checkpoint."""
    return f"step-{step:08d}"


class CheckpointStore:
    """The checkpoints of one run. Rank 0 creates, completes and removes them; each rank writes its own file.

    Args:
        keep: the number of checkpoints to keep; the oldest are removed first.
        seconds: the longest time until other ranks see a file of rank 0.
    """

    def __init__(self, folder: Path, keep: int, seconds: float = FOLDER_SECONDS) -> None:
        self.folder = folder / "checkpoints"
        self._keep = keep
        self._seconds = seconds
        self._held: list[int] = []  # steps, one for each `hold`

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, oldest first."""
        return saved_steps(self.folder.parent)

    def path(self, step: int) -> Path:
        """Return the folder of a complete checkpoint."""
        return self.folder / folder_name(step)

    def unfinished_path(self, step: int) -> Path:
        """Return the temporary folder of a checkpoint."""
        return self.folder / f"{UNFINISHED}{self.path(step).name}"

    def open(self) -> None:
        """Create the folder, and finish or remove the remains of a killed run.

        Raises:
            OSError: the folder cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for aside in self.folder.glob(f"{REPLACED}*"):
            final = self.folder / aside.name.removeprefix(REPLACED)
            if not os.path.lexists(final):  # killed between the two renames of `complete`
                os.rename(aside, final)
        self._remove_leftovers()

    @contextmanager
    def must_be_writable(self) -> Iterator[None]:
        """Turn an error of the file system in the block into one for the user.

        Raises:
            TrainerError: the folder cannot be written.
        """
        try:
            yield
        except OSError as error:
            raise storage_error(
                f"`checkpoint.folder` must be a folder that can be written, but {self.folder} is not: {error};"
                " make room, restore its permissions or name another",
                error,
            ) from error

    def memory_key(self) -> tuple[str, list[str]]:
        """Return the random name of this run's checkpoints in memory, which goes with the folder, and notes.

        Raises:
            OSError: the folder cannot be written.
        """
        file = self.folder / _MEMORY_KEY
        if key := self.read_memory_key():
            return key, []
        # Also a link that leads nowhere, which the new file replaces.
        is_damaged = os.path.lexists(file)
        key = secrets.token_hex(_KEY_BYTES)
        replace_text(file, key)
        note = (
            f"{file} must hold {2 * _KEY_BYTES} hexadecimal digits, but does not; the run creates a new key, and skips"
            " its checkpoints in memory"
        )
        return key, [note] if is_damaged else []

    def newest_facts(self) -> Facts | None:
        """Return everything but the tensors of the newest checkpoint that can be read; None: there is none."""
        from trainer.checkpoint.reading import read_facts

        for step in reversed(self.steps()):
            # An older one serves if the newest is damaged.
            with suppress(OSError, ValueError):
                return read_facts(self.path(step), step)
        return None

    def read_memory_key(self) -> str:
        """Return the name that `memory_key` has given; empty if there is none, or none that it can have given."""
        try:
            # One byte more than a key, so that a longer file is none.
            content = read_plain(self.folder / _MEMORY_KEY, 2 * _KEY_BYTES + 1)
        except OSError:
            return ""
        return content.decode() if _KEY.fullmatch(content) else ""

    def make_marker(self) -> str:
        """Create a file that shows other ranks that they see the same folder, and return its name.

        Raises:
            OSError: the file cannot be created.
        """
        # Random, so that the marker of an earlier start proves nothing.
        name = f"{_MARKER}{secrets.token_hex(8)}"
        (self.folder / name).touch()
        return name

    def sees(self, marker: str) -> bool:
        """Return whether the marker appears within the time limit for network file systems."""
        # The folder is listed, because NFS may remember for a while that a single name is missing.
        end = time.monotonic() + self._seconds
        return wait_until(lambda: os.path.isdir(self.folder) and marker in os.listdir(self.folder), end)

    def remove_marker(self, marker: str) -> None:
        """Remove the marker; after an error, `open` removes it."""
        with suppress(OSError):
            (self.folder / marker).unlink()

    def begin(self, step: int) -> Path:
        """Create the temporary folder of a checkpoint, but not the run's folder.

        Raises:
            OSError: the folder cannot be created.
        """
        self._remove_leftovers()
        temporary = self.unfinished_path(step)
        temporary.mkdir()
        return temporary

    def complete(self, facts: Facts, files: Iterable[WrittenFile]) -> Path:
        """Complete a checkpoint, then remove others.

        Remove the oldest checkpoints beyond `keep`, except that of the best evaluation, and all of later steps. The
        latter were damaged when the run resumed from an earlier one.

        Raises:
            OSError: the checkpoint cannot be written; earlier ones are unchanged.
        """
        step = facts.progress.step
        seal(self.unfinished_path(step), facts, files)
        final = self.adopt(step)
        best = facts.progress.best
        self._rotate(step, best.step if best else None)
        return final

    def adopt(self, step: int) -> Path:
        """Make the temporary folder of a sealed checkpoint the newest one.

        Raises:
            OSError: it cannot be renamed.
        """
        final = self.path(step)
        replace_folder(self.unfinished_path(step), final)
        # After the rename, so that `latest` never names a missing folder.
        replace_text(self.folder / _LATEST, f"{final.name}\n")
        return final

    def discard(self, step: int) -> None:
        """Remove the temporary folder of a checkpoint; errors are ignored."""
        with suppress(OSError):
            remove(self.unfinished_path(step))

    def name_of_last(self) -> str:
        """Return the name of the last checkpoint, for messages."""
        steps = self.steps()
        return f"that of step {steps[-1]}" if steps else "none"

    def _rotate(self, step: int, best: int | None) -> None:
        steps = self.steps()
        # Checkpoints of later steps do not count: the run resumed from before them.
        kept = {*[other for other in steps if other <= step][-self._keep :], *({best} if best is not None else ())}
        self.keep_only(kept.union(self._held))

    def hold(self, step: int) -> None:
        """Keep a checkpoint until `release`, for example while it is copied."""
        self._held.append(step)

    def release(self, step: int) -> None:
        """Let a checkpoint go that `hold` has kept."""
        self._held.remove(step)

    def keep_only(self, kept: Container[int | None]) -> None:
        """Remove the checkpoints of all other steps; errors are ignored."""
        for other in (step for step in self.steps() if step not in kept):
            with suppress(OSError):  # an extra checkpoint does no harm
                # Renamed first: a partly removed checkpoint must not look like a damaged one.
                os.rename(self.path(other), self.folder / f"{_REMOVED}{self.path(other).name}")
        with suppress(OSError):
            self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        for mark in (UNFINISHED, REPLACED, _REMOVED, _MARKER):
            for path in self.folder.glob(f"{mark}*"):
                remove(path)
