"""The tier of copies at another place, such as an object store, through fsspec.

A thread uploads a checkpoint while the training continues. Its `SHA256SUMS` comes last, so a copy without it is not
whole. The copies have the names of the files in the run's folder.
"""

from __future__ import annotations

import json
import posixpath
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trainer.base.disk import read_plain, sync
from trainer.base.errors import StoppedError, TrainerError, UsageError
from trainer.base.text import is_secret_name, without_secrets
from trainer.checkpoint.disk import Disk
from trainer.checkpoint.format import FACTS, SUMS
from trainer.checkpoint.names import steps_of
from trainer.checkpoint.reading import LARGEST_FACTS_BYTES, open_verified, read_sizes, verify
from trainer.checkpoint.registered import TierFeature, TierParts
from trainer.checkpoint.store import folder_name
from trainer.checkpoint.tier import WRITING, Background, Tier
from trainer.engine.state import EngineState
from trainer.features.mirror.section import place_of
from trainer.parallel.mesh import ParallelMesh
from trainer.recipe.schema import Recipe

_CHECKPOINTS = "checkpoints"

SILENT_SECONDS = 60.0
"""The longest time until a place answers; a transfer has more, by the bytes of its file."""
_SLOWEST = 2**18  # bytes a second of a transfer
_LOOK_SECONDS = 0.1

Answer = TypeVar("Answer")


def _never() -> bool:
    return False


def open_place(url: str) -> tuple[Any, str]:
    """Return the file system and the path of a URL.

    Raises:
        UsageError: fsspec does not know the protocol, its package is missing, or it keeps nothing.
        TrainerError: the place does not answer.
    """
    from fsspec.core import url_to_fs

    problem = f"`checkpoint.mirror` must be a place that fsspec can open, but is {without_secrets(url)}"
    try:
        # A cached instance would share the connection on which an earlier question may still wait.
        files, path = _answer(lambda: url_to_fs(url, skip_instance_cache=True))
    except (ImportError, ValueError) as error:
        raise UsageError(
            f"{problem}: {_reason(error)}; install its package, such as s3fs for s3:// and gcsfs for gs://"
        ) from error
    except Exception as error:  # the classes differ between file systems
        raise TrainerError(f"{problem}: {_reason(error)}; restore the access, or name another") from error
    if files.protocol == "memory":
        raise UsageError(
            f"`checkpoint.mirror` must be a place that outlives the run, but is {without_secrets(url)}, the memory of"
            " its process; name another"
        )
    return files, path.rstrip("/")


def newest_facts(url: str) -> Mapping[str, Any]:
    """Return the content of `state.json` of the newest whole copy at a place; empty if there is none.

    Raises:
        TrainerError: the place does not answer.
    """
    files, root = open_place(url)

    def ask() -> bytes:
        names = [posixpath.basename(path.rstrip("/")) for path in files.ls(f"{root}/{_CHECKPOINTS}", detail=False)]
        for step in reversed(steps_of(names)):
            place = f"{root}/{_CHECKPOINTS}/{folder_name(step)}"
            if files.exists(f"{place}/{SUMS}"):
                content: bytes = files.cat_file(f"{place}/{FACTS}", end=LARGEST_FACTS_BYTES)
                return content
        return b"{}"

    try:
        found = json.loads(_answer(ask))
    except (FileNotFoundError, ValueError):  # a copy that is damaged is skipped later
        return {}
    except Exception as error:  # the classes differ between file systems
        raise TrainerError(
            f"`checkpoint.mirror` is {without_secrets(url)}, but its checkpoints could not be listed:"
            f" {_reason(error)}; restore the access, or name another place"
        ) from error
    return found if isinstance(found, dict) else {}


def _answer(question: Callable[[], Answer], num_bytes: int = 0, is_stopped: Callable[[], bool] = _never) -> Answer:
    """Return the answer to a question that a silent server may never give."""
    asked = Background(question)
    seconds = SILENT_SECONDS + num_bytes / _SLOWEST
    end = time.monotonic() + seconds
    while asked.status == WRITING:
        if is_stopped():
            raise StoppedError("stopped by a signal while waiting for `checkpoint.mirror`; nothing is lost")
        if time.monotonic() > end:
            raise TimeoutError(f"it did not answer within {seconds:g} seconds")
        asked.wait(_LOOK_SECONDS)
    if asked.error is not None:
        raise asked.error
    return asked.result  # type: ignore[return-value]  # there is one, if there is no error


def _reason(error: Exception) -> str:
    """Return the message of an error on one line, without the secrets of fsspec's configuration."""
    from fsspec.config import conf

    text = " ".join(str(error).split()) or type(error).__name__
    for options in conf.values():
        for name, value in options.items():
            if is_secret_name(name) and isinstance(value, str) and value:
                text = text.replace(value, "***")
    return without_secrets(text)


class Mirror(Tier):
    """The copies of one run. Rank 0 alone talks to the place; its errors end all ranks together.

    Args:
        url: the place of the copies, such as `s3://bucket/run`.
        is_stopped: returns whether rank 0 has to stop, instead of waiting for an answer before the first upload.

    Raises:
        TrainerError: the place cannot be opened; on every rank.
    """

    def __init__(
        self,
        url: str,
        disk: Disk,
        mesh: ParallelMesh,
        note: Callable[[str], None] = warnings.warn,
        is_stopped: Callable[[], bool] = _never,
    ) -> None:
        self._url = url
        self._name = self.destination = without_secrets(url).rstrip("/")
        self._disk = disk
        self._store = disk.store
        self._mesh = mesh
        self._note = note
        self._is_stopped = is_stopped
        self._copied: int | None = None  # the step of the disk's checkpoint that was sent last
        self._is_lost = False  # whether the connection may be out of step, since a question failed
        self._lock = threading.Lock()
        self._wanted: int | None = None
        self._is_working = False  # whether the thread looks at `_wanted` again
        self._thread: threading.Thread | None = None
        self._problem: str | None = None
        mesh.on_rank_zero(self._connect)

    def _connect(self) -> None:
        self._files, self._root = open_place(self._url)

    def open(self, resumes: bool) -> list[str]:
        """See `Tier`. The newest copy is downloaded into a folder without checkpoints.

        Raises:
            UsageError: there are copies, but the run may not resume.
            TrainerError: the place does not answer, or all copies are damaged.
        """
        return self._mesh.on_rank_zero(lambda: [*self._notes_on_place(), *self._open(resumes)])

    def _notes_on_place(self) -> list[str]:
        if "/" in self._root:  # a folder in a bucket, or a path
            return []
        return [
            f"`checkpoint.mirror` is {self._name}, a whole bucket or server, which another run would share; if a"
            f" variable was not set, name a folder in it, such as {self._name}/{{name}}"
        ]

    def _open(self, resumes: bool) -> list[str]:
        with self._store.must_be_writable():
            self._store.open()
            if self._store.steps():
                return []
            if resumes:
                return self.fetch()
        # The look also tests that the place takes files, before the first upload.
        if steps := self._whole_copies():  # this run would remove them
            raise UsageError(
                f"`checkpoint.resume` is never, but {self._name} has a checkpoint of step {steps[-1]}; name another"
                " `checkpoint.mirror`, or remove it"
            )
        return []

    def begin(self, step: int | None, state: Callable[[], EngineState]) -> list[str]:
        """See `Tier`. Upload the newest whole checkpoint on the disk up to this step, also if memory has a newer one.

        Raises:
            TrainerError: the place does not answer.
        """
        # A checkpoint that the run has just loaded is not sent by `finish`; `_send_missing` looks whether it is there.
        self._copied = self._disk.last
        return [] if step is None else self._mesh.on_rank_zero(lambda: self._send_missing(step))

    def _send_missing(self, last: int) -> list[str]:
        copied, notes = self._whole_copies(), []
        # From the newest down to the first one that is whole or has a copy; older ones stay without a copy.
        for step in reversed([step for step in self._store.steps() if step <= last]):
            if step in copied and self._is_copy(step):
                break
            try:
                if step != self._disk.last:  # that one was verified when it was loaded
                    verify(self._store.path(step))
            except (OSError, ValueError) as error:
                notes.append(f"the checkpoint {self._store.path(step)} is not uploaded: {error}")
                continue
            self.send(step)
            break
        return notes

    def _is_copy(self, step: int) -> bool:
        """Return whether a copy has the sums of the checkpoint on the disk: they may be cut, or of another run."""
        with self._refusing(f"{self._folder(step)}/{SUMS}", "read"):
            sums = self._ask(lambda: self._files.cat_file(f"{self._place(step)}/{SUMS}"))
        return bool(sums == read_plain(self._store.path(step) / SUMS))

    def begin_poll(self) -> Callable[[], None]:
        """See `Tier`. The disk is settled before."""
        return self.finish

    def finish(self) -> None:
        """Start to upload the checkpoint that the disk has just completed."""
        if self._disk.last == self._copied:
            return
        self._copied = self._disk.last
        if self._mesh.rank == 0 and self._copied is not None:
            if problem := self._last_problem():
                self._note(f"{problem}; training continues, and the next checkpoint will be tried")
            self.send(self._copied)

    def deliver(self, model: Path | None) -> None:
        """See `Tier`.

        Raises:
            TrainerError: the last checkpoint or the model could not be uploaded.
        """
        self._mesh.on_rank_zero(lambda: self._deliver(model))

    def _deliver(self, model: Path | None) -> None:
        self._is_stopped = _never
        if self._thread is not None:
            self._thread.join()
        problem = self._last_problem()
        if problem is None and model is not None:
            try:
                self._send_folder(model, f"{self._root}/{model.name}", "config.json")
            except Exception as error:
                problem = self._describe(f"the model {model}", error)
        if problem is not None:
            raise TrainerError(f"{problem}. Restore the access, then start the run again: it uploads what is missing")

    def send(self, step: int) -> None:
        """Upload a complete checkpoint in a thread; it takes the place of one that still waits."""
        self._is_stopped = _never  # an upload is no start of a run
        # The run would remove the checkpoint when newer ones are complete, while the thread still reads its files.
        self._store.hold(step)
        with self._lock:
            # Only the newest waiting checkpoint is uploaded; an upload may take longer than the time between two of
            # them.
            if self._wanted is not None:
                self._store.release(self._wanted)
            self._wanted = step
            if not self._is_working:
                self._is_working = True
                self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
                self._thread.start()

    def _last_problem(self) -> str | None:
        """Return the problem of the last upload, once."""
        with self._lock:
            problem, self._problem = self._problem, None
            return problem

    def _work(self) -> None:
        while True:
            with self._lock:
                step, self._wanted = self._wanted, None
                if step is None:
                    # Under the lock, together with the look at `_wanted`: `send` then starts a new thread, or this one
                    # sees the step.
                    self._is_working = False
                    return
            problem = None
            try:
                self._send_folder(self._store.path(step), self._place(step), SUMS)
                # After the upload, so that the place always has a whole copy.
                self._prune(step)
            except Exception as error:
                problem = self._describe(f"the checkpoint of step {step}", error)
            self._store.release(step)
            with self._lock:
                self._problem = problem

    def steps(self) -> list[int]:
        """Return the steps of the whole copies, oldest first."""
        return [step for step in self._started_copies() if self._info(f"{self._place(step)}/{SUMS}") is not None]

    def _started_copies(self) -> list[int]:
        """Return the steps of all copies, also of those that are not whole."""

        def ask() -> list[str]:
            # fsspec keeps listings, which would lack files that were written since.
            self._files.invalidate_cache()
            return list(self._files.ls(f"{self._root}/{_CHECKPOINTS}", detail=False))

        try:
            paths = self._ask(ask)
        except FileNotFoundError:
            return []
        return steps_of(posixpath.basename(path.rstrip("/")) for path in paths)

    def fetch(self) -> list[str]:
        """Download the newest whole copy into the run's folder on rank 0, and return notes for the user.

        Raises:
            TrainerError: the place does not answer, or has copies, but all are damaged.
            OSError: the run's folder cannot be written.
        """
        notes = []
        for step in reversed(self._whole_copies()):
            temporary = self._store.begin(step)
            try:
                self._download(step, temporary)
                open_verified(temporary, step=step)  # a run would skip it, and begin again beside older copies
            except (FileNotFoundError, ValueError) as error:
                self._store.discard(step)
                notes.append(f"skipped the checkpoint {self._name}/{_CHECKPOINTS}/{self._folder(step)}: {error}")
                continue
            self._store.adopt(step)
            return [*notes, f"the checkpoint of step {step} was downloaded from {self._name}"]
        if notes:  # a training from the start would replace the copies in time
            raise TrainerError(
                f"{'; '.join(notes)}. No copy can be used; restore one, remove them all, or name another"
                " `checkpoint.mirror`"
            )
        return []

    def _whole_copies(self) -> list[int]:
        """Return the steps of the whole copies; a place without any must take a file."""

        def write_and_remove() -> None:
            file = f"{self._root}/.trainer-writes"
            self._files.makedirs(self._root, exist_ok=True)
            self._files.pipe_file(file, b"removed at once")
            self._files.rm_file(file)

        with self._refusing("its checkpoints", "listed"):
            steps = self.steps()
        if not steps:
            with self._refusing("a file", "written there"):
                self._ask(write_and_remove)
        return steps

    @contextmanager
    def _refusing(self, subject: str, verb: str) -> Iterator[None]:
        """Turn a problem of the place, in the block, into an error for the user."""
        try:
            yield
        except StoppedError:
            raise
        except Exception as error:  # the classes differ between file systems
            kind = UsageError if isinstance(error, PermissionError | NotImplementedError) else TrainerError
            raise kind(f"{self._describe(subject, error, verb)}; restore the access, or name another place") from error

    def _download(self, step: int, folder: Path) -> None:
        """Download the files that a copy names: a listing of fsspec leaves out a folder that cannot be read."""

        def download(name: str, num_bytes: int | None = None) -> None:
            remote, local = f"{self._place(step)}/{name}", folder / name
            local.parent.mkdir(parents=True, exist_ok=True)
            with self._refusing(f"{self._folder(step)}/{name}", "downloaded"):
                found = self._info(remote)
            if found is None:
                raise FileNotFoundError(f"it is damaged: {name} is missing")
            if found.get("type") != "file":
                raise ValueError(f"it is damaged: {name} is not a regular file")
            # Compared before the download, because a wrong file could fill the disk.
            size = found.get("size")  # None: the place does not know it
            if size is not None and (size > LARGEST_FACTS_BYTES if num_bytes is None else size != num_bytes):
                raise ValueError(f"it is damaged: {name} has {size} bytes and should have {num_bytes or 'fewer'}")
            with self._refusing(f"{self._folder(step)}/{name}", "downloaded"):
                self._ask(partial(self._files.get_file, remote, str(local)), num_bytes or 0)
            # `adopt` renames the folder, and the files must be on the disk before the name is.
            sync(local)

        # These two come first: they name the other files and their sizes.
        download(SUMS)
        download(FACTS)
        for name, size in read_sizes(folder).items():
            download(name, size)

    def _ask(self, question: Callable[[], Answer], num_bytes: int = 0) -> Answer:
        """Return the answer of the place; after a failure, over a new connection."""
        if self._is_lost:
            self._connect()
        self._is_lost = True  # unless the place answers: a question that timed out may still be on its way
        try:
            answer = _answer(question, num_bytes, self._is_stopped)
        except FileNotFoundError:
            self._is_lost = False
            raise
        self._is_lost = False
        return answer

    def _info(self, path: str) -> Mapping[str, Any] | None:
        """Return the type and size of a file, or None; fsspec's `exists` returns False for a server that is away."""
        try:
            return self._ask(lambda: dict(self._files.info(path)))
        except FileNotFoundError:
            return None

    def _send_folder(self, folder: Path, place: str, last: str) -> None:
        """Upload a folder; the file `last`, which marks a whole copy, is removed first and comes back last."""
        self._remove_mark(f"{place}/{last}")
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        for name in sorted(names, key=lambda name: (name == last, name)):
            remote = f"{place}/{name}"
            self._ask(partial(self._files.makedirs, posixpath.dirname(remote), exist_ok=True))
            self._ask(partial(self._files.put_file, str(folder / name), remote), (folder / name).stat().st_size)

    def _remove_mark(self, path: str) -> None:
        """Remove the file that marks a whole copy, so that a partly removed one does not look like a damaged one."""
        if self._info(path) is not None:
            self._ask(lambda: self._files.rm_file(path))

    def _prune(self, newest: int) -> None:
        """Remove the copies of earlier checkpoints that the run's folder no longer has."""
        kept = self._store.steps()
        for step in self._started_copies():
            if step < newest and step not in kept:
                self._remove_mark(f"{self._place(step)}/{SUMS}")
                self._ask(partial(self._files.rm, self._place(step), recursive=True))

    def _place(self, step: int) -> str:
        return f"{self._root}/{_CHECKPOINTS}/{self._folder(step)}"

    def _folder(self, step: int) -> str:
        return self._store.path(step).name

    def _describe(self, subject: str, error: Exception, verb: str = "uploaded") -> str:
        return f"`checkpoint.mirror` is {self._name}, but {subject} could not be {verb}: {_reason(error)}"


class MirrorFeature(TierFeature):
    """The tier of `checkpoint.mirror`."""

    def build(self, parts: TierParts) -> Mirror:
        return Mirror(place_of(parts.recipe), parts.disk, parts.mesh, parts.note, parts.is_stopped)

    def check(self, recipe: Recipe) -> None:
        open_place(place_of(recipe))

    def newest_facts(self, recipe: Recipe) -> Mapping[str, Any]:
        return newest_facts(place_of(recipe))
