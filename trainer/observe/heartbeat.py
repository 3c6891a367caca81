"""Heartbeats: each rank keeps a record in the run's folder with its step and its current activity.

The ranks of a machine share one file, so 1,024 ranks on 128 machines have 128 files. `ranks/machine-00008.jsonl` is
that of the machine with ranks 8 to 15. Each has a line of a fixed size, overwritten in place, so a beat costs a few
microseconds. A good end removes the file. After a failure it stays, and shows the last activities. Machines never write
to the same file, because network file systems do not keep such writes apart. This module imports no torch.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from trainer.base.disk import open_plain, read_plain, remove
from trainer.base.errors import TrainerError
from trainer.base.processes import start_of, this_machine
from trainer.observe.observer import Observer
from trainer.observe.records import EndRecord

_FOLDER = "ranks"
_RECORD_BYTES = 512
_LARGEST_BYTES = _RECORD_BYTES * 4096  # ranks of a machine
_DYING_SECONDS = 1.0
_LONGEST_TEXT = 100
_LONGEST_JSON = 180  # of a text, whose other letters JSON escapes by six or twelve bytes; so a record always fits


@dataclass(frozen=True)
class Status:
    """The last record of one rank."""

    rank: int
    host: str
    pid: int
    step: int  # the last optimizer step that is done
    doing: str
    time: float  # start of the activity, in seconds since the epoch
    left: bool = False  # the rank has failed with an error of its own

    def __str__(self) -> str:
        return f"after step {self.step}, {self.doing}"


_STATUS = TypeAdapter(Status)


def ranks_folder(run_folder: Path) -> Path:
    """Return the folder of the files of all ranks."""
    return run_folder / _FOLDER


def read_statuses(run_folder: Path) -> dict[int, Status]:
    """Return the last records of the ranks of a run, in order of rank, without missing and incomplete files."""
    statuses = []
    for file in ranks_folder(run_folder).glob("machine-*.jsonl"):
        for record in _records(file):
            # A record that is just being written may be cut.
            with suppress(ValueError):
                statuses.append(_STATUS.validate_json(record, strict=True))
    return {status.rank: status for status in sorted(statuses, key=lambda status: status.rank)}


def killed_ranks(run_folder: Path) -> list[Status]:
    """Return the ranks of this machine that were killed: their processes have ended without an error of their own.

    It waits up to a second for the first of them: a dying process closes its connections before it has ended.
    """
    host, end = _host(), time.monotonic() + _DYING_SECONDS
    while this_machine():
        statuses = read_statuses(run_folder).values()
        killed = [status for status in statuses if status.host == host and not status.left and not start_of(status.pid)]
        if killed or time.monotonic() > end:
            return killed
        time.sleep(0.05)
    return []


def _host() -> str:
    return _cut(socket.gethostname())


def _cut(text: str) -> str:
    """Cut a text to its largest length in a record."""
    text = text[:_LONGEST_TEXT]
    while len(json.dumps(text)) > _LONGEST_JSON:
        text = text[:-1]
    return text


def _records(file: Path) -> list[bytes]:
    """Return the records of a file, without those of ranks that have not begun or have ended well."""
    try:
        content = read_plain(file, _LARGEST_BYTES)
    except OSError:
        return []
    records = (content[start : start + _RECORD_BYTES] for start in range(0, len(content), _RECORD_BYTES))
    return [record for record in records if record.strip(b"\0 \n")]


def forget_statuses(run_folder: Path) -> None:
    """Remove the files of the ranks of an earlier run."""
    with suppress(OSError):  # they serve diagnosis only
        remove(ranks_folder(run_folder))


class Heartbeat(Observer):
    """Observer that writes this rank's record. Every rank has one; it beats from `begin` on.

    A failed write, for example on a full disk, is ignored: the file serves diagnosis only.

    Args:
        local_rank: its number on this machine; the ranks of a machine follow each other.
    """

    def __init__(self, run_folder: Path, rank: int, local_rank: int = 0) -> None:
        self.run_folder = run_folder
        self.rank = rank
        self._first_rank = rank - local_rank
        self._offset = local_rank * _RECORD_BYTES
        self.beats = 0
        self._host = _host()
        self._descriptor: int | None = None
        self._step = 0
        self._status: Status | None = None

    def begin(self, step: int) -> None:
        """Create the file, after `step` steps.

        Raises:
            TrainerError: the file cannot be written.
        """
        folder = ranks_folder(self.run_folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Opened without truncation: other ranks of this machine may have written their records.
            self._descriptor = open_plain(self.file, os.O_WRONLY | os.O_CREAT)
        except OSError as error:
            raise TrainerError(
                f"rank {self.rank} on {self._host} cannot write {folder} ({error.strerror});"
                " `checkpoint.folder` must be a folder that all ranks can write"
            ) from error
        self.doing(step, "beginning")

    @property
    def file(self) -> Path:
        """The path of the file of this rank's machine."""
        return ranks_folder(self.run_folder) / f"machine-{self._first_rank:05d}.jsonl"

    def doing(self, step: int, what: str) -> None:
        # The watchdog of this process reads the count, which costs no look at the disk.
        self.beats += 1
        self._step = step
        if self._descriptor is not None:
            now = round(time.time(), 3)
            self._write(Status(self.rank, self._host, os.getpid(), step, _cut(what), now))

    def _write(self, status: Status) -> None:
        self._status = status
        self._put(json.dumps(asdict(status)))

    def _put(self, record: str) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                # One write at this rank's offset: ranks of a machine write without a lock.
                os.pwrite(self._descriptor, record.encode().ljust(_RECORD_BYTES - 1) + b"\n", self._offset)

    def evaluation_progress(self, done: int, total: int) -> None:
        self.doing(self._step, f"in an evaluation, {done} of {total} batches done")

    def leave(self) -> None:
        """Note in the file that this rank leaves after a failure, so that others do not take it for killed."""
        if self._status is not None:
            self._write(replace(self._status, left=True))

    def end(self, record: EndRecord) -> None:
        """Remove the record, and the file with the last one; after a failure it stays."""
        if record.outcome == "failed":
            self.leave()
        elif self._descriptor is not None:
            # A record of blanks counts as none.
            self._put("")
            if not _records(self.file):
                with suppress(OSError):
                    self.file.unlink()
                    self.file.parent.rmdir()  # succeeds on the last machine only

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
