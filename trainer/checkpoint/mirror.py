"""Copies of a run's checkpoints and final model at another place, such as an object store, through fsspec.

A thread uploads a checkpoint while the training continues. Its `SHA256SUMS` comes last, so a copy without it is not
whole. The copies have the names of the files in the run's folder.
"""

from __future__ import annotations

import posixpath
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.base.disk import sync
from trainer.base.errors import TrainerError, UsageError
from trainer.base.text import without_secrets
from trainer.checkpoint.files import SUMS, verify
from trainer.checkpoint.store import CheckpointStore, steps_of

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
_CHECKPOINTS = "checkpoints"


def open_place(url: str) -> tuple[Any, str]:
    """Return the file system and the path of a URL.

    Raises:
        UsageError: fsspec does not know the protocol, or its package is missing.
    """
    from fsspec.core import url_to_fs

    try:
        files, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UsageError(
            f"`checkpoint.mirror` must be a place that fsspec can open, but is {without_secrets(url)}: {error}; install"
            " its package, such as s3fs for s3:// and gcsfs for gs://"
        ) from error
    return files, path.rstrip("/")


class Mirror:
    """The copies of one run; used on rank 0 alone.

    Args:
        url: the place of the copies, such as `s3://bucket/run`.
        store: the checkpoints of the run's folder.

    Raises:
        UsageError: the place cannot be opened.
    """

    def __init__(self, url: str, store: CheckpointStore) -> None:
        self._files, self._root = open_place(url)
        self._name = without_secrets(url).rstrip("/")
        self._store = store
        self._lock = threading.Lock()
        self._wanted: int | None = None
        self._sending: int | None = None
        self._thread: threading.Thread | None = None
        self._problem: str | None = None

    def needed(self) -> set[int]:
        """Return the steps of local checkpoints that are being uploaded or wait for it."""
        with self._lock:
            return {step for step in (self._wanted, self._sending) if step is not None}

    def send(self, step: int) -> None:
        """Upload a complete checkpoint in a thread; it takes the place of one that still waits."""
        with self._lock:
            self._wanted = step
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
                self._thread.start()

    def send_missing(self, steps: Sequence[int], verified: int | None = None) -> list[str]:
        """Upload the newest checkpoint that is not damaged in a thread, unless its copy is whole.

        Args:
            steps: the checkpoints, oldest first.
            verified: one that need not be verified.

        Returns:
            Notes for the user on damaged ones.

        Raises:
            UsageError: the place does not answer.
        """
        copied, notes = self._asked(), []
        for step in reversed(steps):
            if step in copied:
                break
            try:
                if step != verified:
                    verify(self._store.path(step))
            except (OSError, ValueError) as error:
                notes.append(f"the checkpoint {self._store.path(step)} is not uploaded: {error}")
                continue
            self.send(step)
            break
        return notes

    def problem(self) -> str | None:
        """Return the problem of the last upload, once."""
        with self._lock:
            problem, self._problem = self._problem, None
            return problem

    def finish(self, model: Path | None) -> None:
        """Wait for uploads, and upload the final model.

        Raises:
            TrainerError: the last checkpoint or the model could not be uploaded.
        """
        if self._thread is not None:
            self._thread.join()
        problem = self.problem()
        if problem is None and model is not None:
            try:
                self._send(model, f"{self._root}/{model.name}", "config.json")
            except Exception as error:
                problem = self._words(f"the model {model}", error)
        if problem is not None:
            raise TrainerError(f"{problem}. Mend the access, then start the run again: it uploads what is missing")

    def steps(self) -> list[int]:
        """Return the steps of the whole copies, oldest first."""
        folder = f"{self._root}/{_CHECKPOINTS}"
        self._files.invalidate_cache()
        if not self._files.exists(folder):
            return []
        names = (posixpath.basename(path.rstrip("/")) for path in self._files.ls(folder, detail=False))
        return [step for step in steps_of(names) if self._files.exists(f"{self._place(step)}/{SUMS}")]

    def fetch(self) -> list[str]:
        """Download the newest whole copy into the store, and return notes for the user.

        Raises:
            UsageError: the place does not answer, or a file of a copy cannot be downloaded.
            OSError: the run's folder cannot be written.
        """
        notes = []
        for step in reversed(self._asked()):
            temporary = self._store.begin(step)
            try:
                self._download(step, temporary)
                verify(temporary)
            except ValueError as error:
                self._store.discard(step)
                notes.append(f"passed over the checkpoint {self._name}/{_CHECKPOINTS}/{self._folder(step)}: {error}")
                continue
            self._store.adopt(step)
            return [*notes, f"the checkpoint of step {step} was downloaded from {self._name}"]
        return notes

    def refuse_copies(self) -> list[str]:
        """Refuse whole copies, which a run that does not resume from them would remove; return no note.

        Raises:
            UsageError: there are copies, or the place does not answer.
        """
        if steps := self._asked():
            raise UsageError(
                f"`checkpoint.resume` is never, but {self._name} has a checkpoint of step {steps[-1]}; name another"
                " `checkpoint.mirror`, or remove it"
            )
        return []

    def _asked(self) -> list[int]:
        try:
            return self.steps()
        except Exception as error:  # the classes differ between file systems
            raise UsageError(self._words("its checkpoints", error, "listed")) from error

    def _download(self, step: int, folder: Path) -> None:
        place = self._place(step)
        for path in self._files.find(place):
            name = posixpath.relpath(path, place)
            if not all(_PLAIN_NAME.fullmatch(part) for part in name.split("/")):
                raise ValueError(f"it is damaged: it has a file {name!r}")
            local = folder / name
            local.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._files.get_file(path, str(local))
            except Exception as error:
                raise UsageError(self._words(f"{self._folder(step)}/{name}", error, "downloaded")) from error
            sync(local)

    def _work(self) -> None:
        while True:
            with self._lock:
                step, self._wanted = self._wanted, None
                self._sending = step
                if step is None:
                    return
            problem = None
            try:
                self._send(self._store.path(step), self._place(step), SUMS)
                self._prune(step)
            except Exception as error:
                problem = self._words(f"the checkpoint of step {step}", error)
            with self._lock:
                self._problem = problem

    def _send(self, folder: Path, place: str, last: str) -> None:
        """Upload a folder; the file `last`, which marks a whole copy, is removed first and comes back last."""
        self._files.invalidate_cache()
        if self._files.exists(f"{place}/{last}"):
            self._files.rm_file(f"{place}/{last}")
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        for name in sorted(names, key=lambda name: (name == last, name)):
            remote = f"{place}/{name}"
            self._files.makedirs(posixpath.dirname(remote), exist_ok=True)
            self._files.put_file(str(folder / name), remote)

    def _prune(self, newest: int) -> None:
        """Remove the copies of checkpoints that the run's folder no longer has."""
        for step in set(self.steps()) - {*self._store.steps(), newest}:
            self._files.rm_file(f"{self._place(step)}/{SUMS}")  # a partly removed copy must not look like a damaged one
            self._files.rm(self._place(step), recursive=True)

    def _place(self, step: int) -> str:
        return f"{self._root}/{_CHECKPOINTS}/{self._folder(step)}"

    def _folder(self, step: int) -> str:
        return self._store.path(step).name

    def _words(self, subject: str, error: Exception, verb: str = "uploaded") -> str:
        why = without_secrets(" ".join(str(error).split()) or type(error).__name__)
        return f"`checkpoint.mirror` is {self._name}, but {subject} could not be {verb}: {why}"
