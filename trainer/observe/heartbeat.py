"""Signs of life: each rank keeps one small file in the run's folder that says how far it is and what it does.

`ranks/rank-00003.json` is one record of a fixed size, written over in place, so that a beat costs some microseconds. It
is gone after a good end and stays after a bad one, where others read in it what the rank did last. Imports no torch.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.base.errors import TrainerError
from trainer.observe.observer import Observer
from trainer.observe.records import EndRecord

_FOLDER = "ranks"
_RECORD_BYTES = 512
_LONGEST_TEXT = 100  # so that a record always fits, however its letters are escaped


@dataclass(frozen=True)
class Status:
    """What one rank wrote last."""

    rank: int
    host: str
    pid: int
    step: int  # the last optimizer step that it has done
    doing: str
    time: float  # seconds since the epoch, when it began to do that

    def __str__(self) -> str:
        return f"after step {self.step}, {self.doing}"


def ranks_folder(run_folder: Path) -> Path:
    """Where the ranks of a run keep their files."""
    return run_folder / _FOLDER


def read_statuses(run_folder: Path) -> dict[int, Status]:
    """What the ranks of a run wrote last, in order of rank; without those whose file is gone or torn."""
    statuses = sorted(_parsed(ranks_folder(run_folder)), key=lambda status: status.rank)
    return {status.rank: status for status in statuses}


def _parsed(folder: Path) -> Iterator[Status]:
    for file in folder.glob("rank-*.json"):
        with suppress(OSError, ValueError, TypeError):
            yield Status(**json.loads(file.read_bytes()))


def forget_statuses(run_folder: Path) -> None:
    """Removes what ranks of an earlier run have left."""
    shutil.rmtree(ranks_folder(run_folder), ignore_errors=True)


class Heartbeat(Observer):
    """Writes this rank's file. Every rank has one; it beats from `begin` on.

    A beat that cannot be written, on a full disk say, ends nothing: the file is for the worse day only.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.beats = 0
        self.run_folder: Path | None = None
        self._host = socket.gethostname()[:_LONGEST_TEXT]
        self._descriptor: int | None = None
        self._step = 0

    def begin(self, run_folder: Path, step: int) -> None:
        """Makes the file.

        Raises:
            TrainerError: it cannot be written.
        """
        self.run_folder = run_folder
        try:
            ranks_folder(run_folder).mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise TrainerError(
                f"rank {self.rank} on {self._host} cannot write {ranks_folder(run_folder)} ({error.strerror});"
                " `checkpoint.folder` must be a folder that all ranks can write"
            ) from error
        self.doing(step, "beginning")

    @property
    def file(self) -> Path:
        """Where the record stands."""
        assert self.run_folder is not None, "it has not begun"
        return ranks_folder(self.run_folder) / f"rank-{self.rank:05d}.json"

    def doing(self, step: int, what: str) -> None:
        self.beats += 1
        self._step = step
        if self._descriptor is not None:
            status = Status(self.rank, self._host, os.getpid(), step, what[:_LONGEST_TEXT], round(time.time(), 3))
            with suppress(OSError):
                os.pwrite(self._descriptor, json.dumps(asdict(status)).encode().ljust(_RECORD_BYTES), 0)

    def evaluation_progress(self, done: int, total: int) -> None:
        self.doing(self._step, f"in an evaluation, {done} of {total} batches done")

    def end(self, record: EndRecord) -> None:
        """Removes the file after a good end."""
        if record.outcome != "failed" and self._descriptor is not None:
            with suppress(OSError):
                self.file.unlink()
                self.file.parent.rmdir()  # the last one does

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
