"""Checkpoints in the memory of the hosts, which survive the processes of a run.

Each rank writes its share into a folder of a memory file system. With several hosts, a rank of the next host keeps a
copy, so that the loss of one host loses nothing. The files of a share are those of a checkpoint on the disk:

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
import socket
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import psutil
from safetensors import safe_open
from torch import Tensor

from trainer.base import cgroup
from trainer.base.disk import is_in_memory, open_plain, read_plain, remove
from trainer.base.errors import UsageError
from trainer.checkpoint.background import FAILED, WRITING, Background
from trainer.checkpoint.format import (
    FACTS,
    SUMS,
    Facts,
    SavedBox,
    SavedBoxes,
    read_block,
    read_facts,
    saved_boxes,
    seal,
    share_name,
    verify,
    write_share,
)
from trainer.checkpoint.peers import Peers
from trainer.checkpoint.store import CheckpointStore
from trainer.parallel.mesh import ParallelMesh
from trainer.ranks.messages import decode, encode

_PLACE = re.compile(r"rank-([0-9]{5,9})-of-([0-9]{5,9})")
HOST = "host"
"""The file with the random name of a host."""
KEPT = 2
"""Checkpoints in memory: the newest complete one, and the one before or the next."""
_HOST_BYTES = 8
_QUESTION, _ANSWER = 1, 2  # tags of messages


@dataclass(frozen=True)
class Found:
    """A complete checkpoint in memory, saved by `size` ranks; `holders` are the hosts of each rank's share."""

    step: int
    size: int
    holders: Mapping[int, Sequence[int]]


class MemoryState(SavedBoxes):
    """A `StateSource` of shares on several hosts; files of other hosts are read through `ask`."""

    def __init__(
        self,
        folder: Path,
        facts: Facts,
        boxes: Sequence[SavedBox],
        local: frozenset[Path],
        ask: Callable[[Path], _RemoteFile],
    ) -> None:
        super().__init__(folder, facts, boxes)
        self.local = local
        self._ask = ask

    def open_file(self, file: Path) -> AbstractContextManager[Any]:
        """See `SavedBoxes`; `file` is relative to the folder of the run in memory."""
        return super().open_file(self.folder / file) if file in self.local else nullcontext(self._ask(file))


def folder_of_run(folder: Path, run_folder: Path) -> Path:
    """Return the folder of a run's checkpoints in memory, or a free place for it.

    Any user may create a folder there, so one that another user has, or may write to, is passed over.
    """
    run = hashlib.sha256(os.fsencode(run_folder.absolute())).hexdigest()[:16]
    name = f"trainer-{os.getuid()}-{run}"
    folder = folder.absolute()
    taken: set[str] = set()
    with suppress(OSError):  # `claim` will raise it
        taken = {one for one in os.listdir(folder) if one.startswith(name)}
    own = min((one for one in taken if _is_own(folder / one)), default=None)
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(1)))
    return folder / (own or next(one for one in names if one not in taken))


def _is_own(folder: Path) -> bool:
    """Return whether this user alone may write to a folder."""
    try:
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


def remove_unused(folder: Path, kept: str | None = None) -> None:
    """Remove the checkpoints of a run's folder in memory that no process of this host uses, but those of a key."""
    with suppress(FileNotFoundError):
        for root in folder.iterdir():
            if root.name != kept and not is_used(root):
                with suppress(OSError):
                    remove(root)
    with suppress(OSError):  # another run of this path, in another container, may use it
        folder.rmdir()


class HostMemory:
    """The checkpoints of one run in the memory of the hosts. All ranks must call each method.

    Args:
        folder: a folder of each host, on a memory file system.
        run_folder: the folder of the run.
        mesh: the ranks.
    """

    def __init__(self, folder: Path, run_folder: Path, mesh: ParallelMesh) -> None:
        self.folder = folder_of_run(folder, run_folder)
        self._root = self.folder
        self._use: BinaryIO | None = None  # the lock that keeps other runs from removing the checkpoints
        self._mesh = mesh
        self._hosts: list[int] = []  # the index of the host of each rank
        self._names: list[str] = []  # the name of the host of each rank
        self._peers: Peers | None = None
        self._target, self._sources = 0, list[int]()  # of copies
        self._complete: int | None = None
        self._step = 0  # of the checkpoint that is being written
        self._background: Background[None] | None = None
        self._has_room = False

    @property
    def is_empty(self) -> bool:
        """Whether no checkpoint is complete."""
        return self._complete is None

    def open(self, key: str) -> None:
        """Create the folder on each host, and remove checkpoints of earlier runs with another key.

        Raises:
            UsageError: the folder cannot be written on a host.
        """
        host = problem = ""
        try:
            host = self._enter(key)
        except OSError as error:
            problem = f"{error} (rank {self._mesh.rank} on {socket.gethostname()})"
        answers = self._mesh.share(self._mesh.gather((problem, host, socket.gethostname())))
        for problem, _, _ in answers:
            if problem:
                raise UsageError(
                    "`checkpoint.memory.folder` must be a folder of each host that can be written, but is"
                    f" {self.folder.parent}: {problem}; name another, or set `checkpoint.memory` to null"
                )
        order = list(dict.fromkeys(host for _, host, _ in answers))
        self._hosts = [order.index(host) for _, host, _ in answers]
        self._names = [name for _, _, name in answers]
        if len(order) > 1:
            targets = [self._target_of(rank) for rank in range(self._mesh.world_size)]
            self._target = targets[self._mesh.rank]
            self._sources = [rank for rank, target in enumerate(targets) if target == self._mesh.rank]
            self._peers = Peers(self._mesh.new_group())

    def found(self) -> list[Found]:
        """Return the complete checkpoints, newest first."""
        held = held_in(self._root) if self._leads else {}
        every = zip(self._hosts, self._mesh.share(self._mesh.gather(held)), strict=True)
        complete = [Found(*key, parts) for key, parts in complete_in(every).items()]
        return sorted(complete, key=lambda one: (one.step, one.size == self._mesh.world_size), reverse=True)

    def read(self, found: Found) -> tuple[MemoryState | None, list[str]]:
        """Verify a checkpoint, and return its state, None if it is damaged, with the problems of shares.

        A share on the host of its rank is preferred; if it is damaged, the copy of another host is used.
        """
        refused: set[tuple[int, int]] = set()
        opened: dict[int, tuple[list[SavedBox], Facts]] = {}
        problems: list[str] = []
        while True:
            chosen: dict[int, int] = {}
            for part, hosts in found.holders.items():
                usable = [host for host in hosts if (part, host) not in refused]
                if not usable:
                    return None, problems
                own = self._hosts[part] if found.size == self._mesh.world_size else -1
                chosen[part] = own if own in usable else usable[0]
            mine = [part for part, host in chosen.items() if self._reader(part, host) == self._mesh.rank]
            damages = []
            for part in mine:
                if part not in opened:
                    try:
                        opened[part] = self._open_share(found, part)
                    except (OSError, ValueError) as error:
                        damages.append((part, chosen[part], f"the share of rank {part} on {self._name}: {error}"))
            damaged = [damage for some in self._mesh.share(self._mesh.gather(damages)) for damage in some]
            if not damaged:
                try:
                    return self._state(found, chosen, {part: opened[part] for part in mine}), problems
                except ValueError as error:  # of the shares together, so on all ranks
                    return None, [*problems, str(error)]
            refused |= {(part, host) for part, host, _ in damaged}
            problems += [text for _, _, text in damaged]

    @contextmanager
    def serving(self, state: MemoryState) -> Iterator[None]:
        """Answer questions of other hosts for elements of this rank's files, while all ranks load the state."""
        if self._peers is None:
            yield
            return
        thread = threading.Thread(target=self._serve, args=(self._peers, state), name="shares", daemon=True)
        thread.start()
        yield
        self._mesh.barrier()
        self._peers.send(b"", (self._mesh.rank + 1) % self._mesh.world_size, _QUESTION)
        thread.join()

    def keep(self, step: int | None) -> None:
        """Remove all checkpoints but that of a step; None: all."""
        self._complete = step
        if self._leads:
            for place in _places(self._root):
                CheckpointStore(place, KEPT).keep_only({step})
        self._mesh.barrier()  # no rank writes a new share beside an old one of another rank

    def require_room(self, num_bytes: int) -> None:
        """Require memory for two checkpoints, where this rank's share has `num_bytes`.

        Raises:
            UsageError: a host has too little memory.
        """
        shares = self._mesh.agree_each(num_bytes)
        ranks = [rank for rank in range(self._mesh.world_size) if self._hosts[rank] == self._host]
        copied = [rank for rank in range(self._mesh.world_size) if self._peers and self._target_of(rank) in ranks]
        needed = KEPT * (sum(shares[rank] for rank in ranks) + sum(shares[rank] for rank in copied))
        problem = ""
        if self._leads:
            held = sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())
            room, where = room_in(self.folder)
            if needed > room + held:
                copies = f" and copies of {len(copied)}" if copied else ""
                problem = (
                    f"`checkpoint.memory` needs {_size(needed)} in {self.folder.parent} of {self._name}, for two"
                    f" checkpoints of its ranks ({len(ranks)}){copies}, but only {_size(room + held)} are free {where};"
                    " enlarge it (docker run --shm-size, --memory), use more hosts, or set `checkpoint.memory` to null"
                )
        if problems := [text for text in self._mesh.share(self._mesh.gather(problem)) if text]:
            raise UsageError(problems[0])

    def save(self, facts: Facts, tensors: Mapping[str, Tensor]) -> str | None:
        """Begin to write this rank's share, after the previous checkpoint; return a note if that one failed.

        Raises:
            UsageError: a host has too little memory.
        """
        note = self.finish()
        if not self._has_room:
            self.require_room(sum(tensor.nbytes for tensor in tensors.values()))
            self._has_room = True
        self._step = facts.progress.step
        self._background = Background(lambda: self._write(facts, tensors))
        return note

    def begin_poll(self) -> Callable[[], str | None]:
        """Start to compare the status of all ranks; return a function that completes a checkpoint, with its note."""
        if self._background is None:
            return lambda: None
        answer = self._mesh.begin_agree_max(self._background.status)

        def settle() -> str | None:
            return None if (status := answer()) == WRITING else self._settle(status)

        return settle

    def finish(self) -> str | None:
        """Wait until the current checkpoint is complete; return a note if it failed."""
        if self._background is None:
            return None
        self._background.wait()
        return self._settle(self._mesh.agree_max(self._background.status))

    def clear(self) -> None:
        """Free the memory on all hosts, after `finish`."""
        self._complete = None
        if self._use is not None:
            self._use.close()
        if self._leads:
            shutil.rmtree(self._root, ignore_errors=True)
            with suppress(OSError):  # another run of this path, in another container, may use it
                self.folder.rmdir()

    @property
    def _host(self) -> int:
        return self._hosts[self._mesh.rank]

    @property
    def _name(self) -> str:
        return self._names[self._mesh.rank]

    @property
    def _leads(self) -> bool:
        """Whether this rank is the first of its host."""
        return self._hosts.index(self._host) == self._mesh.rank

    def _enter(self, key: str) -> str:
        """Create the folder of the run, and return the name of this host."""
        claim(self.folder)
        self._root = self.folder / key
        self._root.mkdir(exist_ok=True)
        remove_unused(self.folder, key)
        draft = self._root / f".{HOST}-{secrets.token_hex(8)}"
        draft.write_text(secrets.token_hex(_HOST_BYTES))
        with suppress(FileExistsError):
            os.link(draft, self._root / HOST)  # the first rank names the host
        draft.unlink()
        self._use = os.fdopen(open_plain(self._root / HOST, os.O_RDONLY), "rb")
        fcntl.flock(self._use, fcntl.LOCK_SH)
        return host_name(self._root)

    def _target_of(self, rank: int) -> int:
        """Return the rank of the next host that keeps the copy of a rank's share."""
        host = self._hosts[rank]
        following = (host + 1) % len(set(self._hosts))
        local = [other for other, its in enumerate(self._hosts) if its == host].index(rank)
        targets = [other for other, its in enumerate(self._hosts) if its == following]
        return targets[local % len(targets)]

    def _reader(self, part: int, host: int) -> int:
        """Return the rank that reads a share on a host for the others."""
        ranks = [rank for rank, its in enumerate(self._hosts) if its == host]
        return ranks[part % len(ranks)]

    def _store(self, rank: int) -> CheckpointStore:
        return CheckpointStore(self._root / place_of(rank, self._mesh.world_size), KEPT)

    def _share_folder(self, found: Found, part: int) -> Path:
        return CheckpointStore(Path(place_of(part, found.size)), KEPT).path(found.step)

    def _open_share(self, found: Found, part: int) -> tuple[list[SavedBox], Facts]:
        """Verify a share on this host, and return its blocks and facts.

        Raises:
            OSError, ValueError: it is missing or damaged.
        """
        folder = self._root / self._share_folder(found, part)
        verify(folder)
        facts = read_facts(folder, found.step)
        return list(saved_boxes(folder, [share_name(part, found.size)])), facts

    def _state(
        self, found: Found, chosen: Mapping[int, int], mine: Mapping[int, tuple[list[SavedBox], Facts]]
    ) -> MemoryState:
        """Return the state of verified shares; each rank lists the blocks of its own for the others.

        Equal shapes are sent once, and the other facts are those of the first share.

        Raises:
            ValueError: the shares together are not the whole state; on all ranks.
        """
        listed: list[Any] = []
        shapes: dict[str, tuple[int, ...]] = {}
        described = None
        for part, (boxes, facts) in mine.items():
            listed.append((part, [(box.key, box.shape) for box in boxes]))
            shapes |= facts.shapes
            if part == 0:
                described = replace(facts, shapes={}).to_json()
        distinct = self._mesh.gather_distinct(shapes)
        shapes = self._mesh.share({name: shape for some in distinct or [] for name, shape in some.items()})
        gathered = self._mesh.share(self._mesh.gather((described, listed)))
        facts = Facts.from_json(next(one for one, _ in gathered if one is not None))
        boxes_of_all: list[SavedBox] = []
        files: dict[Path, int] = {}
        for part, keys in (one for _, some in gathered for one in some):
            file_path = self._share_folder(found, part) / share_name(part, found.size)
            files[file_path] = part
            boxes_of_all += [SavedBox.of_key(file_path, key, tuple(shape)) for key, shape in keys]

        def ask(file: Path) -> _RemoteFile:
            assert self._peers is not None
            return _RemoteFile(self._peers, self._reader(files[file], chosen[files[file]]), file)

        local = frozenset(file for file, part in files.items() if chosen[part] == self._host)
        return MemoryState(self._root, replace(facts, shapes=shapes), boxes_of_all, local, ask)

    def _serve(self, peers: Peers, state: MemoryState) -> None:
        while True:
            sender, question = peers.receive(None, _QUESTION)
            if not question:
                return
            name, key, bounds = decode(question)
            answer: Any
            try:
                if Path(name) not in state.local:
                    raise FileNotFoundError(f"{name} is on another host")
                with safe_open(self._root / name, framework="pt") as opened:
                    answer = read_block(opened, key, bounds)
            except Exception as error:
                answer = str(error)
            peers.send(encode(answer), sender, _ANSWER)

    def _write(self, facts: Facts, tensors: Mapping[str, Tensor]) -> None:
        """Write this rank's share and the copies that it keeps; the memory of older ones is freed before."""
        step, own = facts.progress.step, self._store(self._mesh.rank)
        name = share_name(self._mesh.rank, self._mesh.world_size)
        error: Exception | None = None
        try:
            self._begin(own, step)
            folder = own.unfinished_path(step)
            seal(folder, facts, [write_share(folder, name, tensors)])
            own.adopt(step)
        except Exception as raised:
            error = raised  # the other ranks still wait for this one
        if self._peers is not None:
            sent = self._peers.begin_send([own.path(step) / file for file in (FACTS, SUMS, name)], self._target)
            for source in self._sources:
                try:
                    self._take_copy(self._peers, source, step)
                except Exception as raised:
                    error = error or raised
            for work in sent:
                work.wait()
        if error is not None:
            raise error

    def _take_copy(self, peers: Peers, source: int, step: int) -> None:
        store, name = self._store(source), share_name(source, self._mesh.world_size)
        folder = store.unfinished_path(step)
        with suppress(OSError):  # the files cannot be written either
            self._begin(store, step)
        peers.take([folder / file for file in (FACTS, SUMS, name)], source)
        verify(folder)
        store.adopt(step)

    def _begin(self, store: CheckpointStore, step: int) -> None:
        claim(self.folder)  # again, if a cleaner has removed it
        store.folder.mkdir(parents=True, exist_ok=True)
        store.keep_only({self._complete})
        store.begin(step)

    def _settle(self, status: int) -> str | None:
        background, self._background = self._background, None
        assert background is not None
        background.wait()  # after a failure of another rank, this one may still write
        stores = [self._store(rank) for rank in (self._mesh.rank, *self._sources)]
        if status == FAILED:
            error = background.error
            is_consequence = isinstance(error, FileNotFoundError)  # another rank had nothing to send
            failure = (is_consequence, f"rank {self._mesh.rank} on {self._name}: {error}") if error else None
            for store in stores:
                store.discard(self._step)
                store.keep_only({self._complete})
            failures = sorted(one for one in self._mesh.gather(failure) or [] if one)
            return (
                f"the checkpoint of step {self._step} could not be written to the memory in {self.folder}:"
                f" {failures[0][1]}; the training goes on, and the next one is tried"
                if failures  # on rank 0
                else None
            )
        self._complete = self._step
        if self._leads:
            here = [rank for rank in range(self._mesh.world_size) if self._hosts[rank] == self._host]
            kept = {*here, *(rank for rank in range(self._mesh.world_size) if self._target_of(rank) in here)}
            names = {place_of(rank, self._mesh.world_size) for rank in kept}
            for place in _places(self._root):
                if place.name not in names:  # of another layout, or of a rank that has moved to another host
                    shutil.rmtree(place, ignore_errors=True)
        return None


class _RemoteFile:
    """A file of tensors on another host, with the methods of `safe_open` that reading needs."""

    def __init__(self, peers: Peers, rank: int, file: Path) -> None:
        self._peers = peers
        self._rank = rank
        self._file = file

    def get_tensor(self, key: str) -> Tensor:
        return self._block(key, [])

    def get_slice(self, key: str) -> _RemoteSlice:
        return _RemoteSlice(lambda bounds: self._block(key, bounds))

    def _block(self, key: str, bounds: list[list[int]]) -> Tensor:
        self._peers.send(encode([str(self._file), key, bounds]), self._rank, _QUESTION)
        answer = decode(self._peers.receive(self._rank, _ANSWER)[1])
        if not isinstance(answer, Tensor):
            raise OSError(f"rank {self._rank} cannot read {self._file}: {answer}")
        return answer


class _RemoteSlice:
    def __init__(self, block: Callable[[list[list[int]]], Tensor]) -> None:
        self._block = block

    def __getitem__(self, places: tuple[slice, ...]) -> Tensor:
        return self._block([[place.start, place.stop] for place in places])


def place_of(rank: int, size: int) -> str:
    """Return the name of the folder of a rank's shares."""
    return f"rank-{rank:05d}-of-{size:05d}"


def _numbers_of(name: str) -> tuple[int, int]:
    """Return the rank and the number of ranks of a folder's name."""
    match = _PLACE.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2])


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
    for place in _places(root):
        store = CheckpointStore(place, KEPT)
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
            part, size = _numbers_of(name)
            for step in steps:
                holders.setdefault((step, size), {}).setdefault(part, []).append(holder)
    return {key: parts for key, parts in holders.items() if parts.keys() == set(range(key[1]))}


def _places(root: Path) -> list[Path]:
    if not root.is_dir():  # a cleaner of the memory file system has removed it
        return []
    return [place for place in root.iterdir() if _PLACE.fullmatch(place.name)]


def is_used(root: Path) -> bool:
    """Return whether a run on this host uses the checkpoints in a folder."""
    try:
        with open(open_plain(root / HOST, os.O_RDONLY), "rb") as host:
            fcntl.flock(host, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (FileNotFoundError, NotADirectoryError):  # no run has opened it
        return False
    return False


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"
