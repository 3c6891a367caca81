"""The tier of checkpoints in the memory of the hosts, which survive the processes of a run.

Each rank writes its share on its own host. With several hosts, a rank of the next host keeps a copy, so that the loss
of one host loses nothing. `folder.py` describes the files.
"""

from __future__ import annotations

import shutil
import socket
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from trainer.base.digests import digest_of
from trainer.base.errors import UsageError
from trainer.base.text import size
from trainer.checkpoint.format import Facts, seal, share_name, write_share
from trainer.checkpoint.reading import BlockReader, SavedBox, SavedBoxes, open_blocks, read_facts, saved_boxes, verify
from trainer.checkpoint.store import CheckpointStore
from trainer.checkpoint.tier import Background, Found, Snapshot, WritingTier, gather_shapes
from trainer.engine.engine import Engine
from trainer.engine.state import EngineState
from trainer.features.host_memory.folder import (
    KEPT,
    begin_share,
    claim,
    complete_in,
    enter,
    folder_of_run,
    held_in,
    place_of,
    places,
    room_in,
)
from trainer.features.host_memory.peers import Peers
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.shards.boxes import own_share

_Share = tuple[list[SavedBox], Facts]


@dataclass(frozen=True)
class FoundShares(Found):
    """A complete checkpoint in memory, saved by `size` ranks; `holders` are the hosts of each rank's share."""

    size: int
    holders: Mapping[int, Sequence[int]]


class SavedShares(SavedBoxes):
    """A `StateSource` of shares on several hosts; `remote` has the rank that reads each file of another host."""

    def __init__(
        self, root: Path, facts: Facts, boxes: Sequence[SavedBox], remote: Mapping[Path, int], peers: Peers | None
    ) -> None:
        super().__init__(root, facts, boxes)
        self._remote = remote
        self._peers = peers

    def open_file(self, file: Path) -> AbstractContextManager[BlockReader]:
        """See `SavedBoxes`; `file` is relative to the folder of the run in memory."""
        if file not in self._remote:
            return super().open_file(self.folder / file)
        assert self._peers is not None, "there are several hosts"
        return self._peers.open_blocks(file, self._remote[file])

    def open_local(self, file: Path) -> AbstractContextManager[BlockReader]:
        """Open a file of this host, for another one.

        Raises:
            FileNotFoundError: the file is on another host.
        """
        if file in self._remote or file not in self.files:
            raise FileNotFoundError(f"{file} is on another host")
        return open_blocks(self.folder / file)


@dataclass(frozen=True)
class _Hosts:
    """The hosts of the ranks: `indices` has the index of each rank's host, `names` its name for messages."""

    rank: int
    indices: Sequence[int] = ()
    names: Sequence[str] = ()

    @property
    def own(self) -> int:
        return self.indices[self.rank]

    @property
    def are_several(self) -> bool:
        return len(set(self.indices)) > 1

    def ranks_on(self, host: int) -> list[int]:
        return [rank for rank, index in enumerate(self.indices) if index == host]

    def target_of(self, rank: int) -> int:
        """Return the rank of the next host that keeps the copy of a rank's share."""
        host = self.indices[rank]
        targets = self.ranks_on((host + 1) % len(set(self.indices)))
        return targets[self.ranks_on(host).index(rank) % len(targets)]

    def sources_of(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks with copies that some ranks keep."""
        every = range(len(self.indices)) if self.are_several else ()
        return [rank for rank in every if self.target_of(rank) in ranks]


class HostMemory(WritingTier[None]):
    """The checkpoints of one run in the memory of the hosts. A failed write is a note."""

    is_lasting = False

    def __init__(
        self, folder: Path, store: CheckpointStore, mesh: ParallelMesh, note: Callable[[str], None] = warnings.warn
    ) -> None:
        super().__init__(mesh)
        self.folder = folder_of_run(folder, store.folder.parent)
        self._disk = store
        self._note = note
        self._num_failed = 0
        self._root = self.folder
        self._lock: BinaryIO | None = None  # it keeps other runs from removing the checkpoints
        self._host = ""  # its random name
        self._hosts = _Hosts(mesh.rank)
        self._peers: Peers | None = None  # if there are several hosts
        self._has_room = False

    def open(self, resumes: bool) -> list[str]:
        """See `Tier`. Checkpoints of earlier runs with another key are removed.

        Raises:
            UsageError: the folder cannot be written on a host.
        """
        key, notes = self._mesh.on_rank_zero(self._key)
        self.enter(key)
        return list(notes)

    def _key(self) -> tuple[str, list[str]]:
        with self._disk.must_be_writable():
            return self._disk.memory_key()

    def enter(self, key: str) -> None:
        """Create the folder of a key on each host; see `open`."""
        self._root = self.folder / key
        self._mesh.on_every_rank(self._enter)
        answers = self._mesh.all_gather((self._host, socket.gethostname()))
        # The hosts are numbered in the order of their first ranks, alike on all ranks.
        order = list(dict.fromkeys(host for host, _ in answers))
        self._hosts = _Hosts(self._mesh.rank, [order.index(host) for host, _ in answers], [name for _, name in answers])
        if self._hosts.are_several:
            self._peers = Peers(self._mesh.new_group())

    def _enter(self) -> None:
        try:
            self._host, self._lock = enter(self._root)
        except OSError as error:
            raise UsageError(
                "`checkpoint.memory.folder` must be a folder of each host that can be written, but is"
                f" {self.folder.parent}: {error} (rank {self._mesh.rank} on {socket.gethostname()}); name another, or"
                " set `checkpoint.memory` to null"
            ) from error

    def checkpoints(self) -> list[FoundShares]:
        """See `Tier`; of equal steps, that of as many ranks is preferred."""
        # One rank of each host looks, because `held_in` also removes the remains of killed runs.
        held = held_in(self._root) if self._leads else {}
        complete = [
            FoundShares(step, f"the checkpoint of step {step} in memory", size, holders)
            for (step, size), holders in complete_in(
                zip(self._hosts.indices, self._mesh.all_gather(held), strict=True)
            ).items()
        ]
        # False sorts first: a checkpoint of as many ranks has each share on the host of its rank.
        return sorted(complete, key=lambda one: one.size != self._mesh.world_size)

    def read(self, found: FoundShares) -> tuple[SavedShares | None, list[str]]:
        """See `Tier`. A share on the host of its rank is preferred; the copy of another host replaces a damaged one."""
        hosts = {part: self._by_preference(found, part) for part in found.holders}
        shares: dict[int, _Share] = {}  # verified, of those that this rank reads
        problems: list[str] = []
        # Each round reads every share from its preferred host. A damaged one tries its next host; without any, the loop
        # ends.
        while all(hosts.values()):
            damaged = []
            for part in hosts:
                if self._reader(part, hosts) == self._mesh.rank and part not in shares:
                    try:
                        shares[part] = self._open_share(found, part)
                    except (OSError, ValueError) as error:
                        damaged.append((part, f"the share of rank {part} on {self._name}: {error}"))
            damaged = [one for some in self._mesh.all_gather(damaged) for one in some]
            if not damaged:
                try:
                    return self._state(found, hosts, shares), problems
                except ValueError as error:  # of the shares together, so on all ranks
                    return None, [*problems, str(error)]
            # All ranks have the same list, so their preferences stay equal.
            for part, problem in damaged:
                hosts[part].pop(0)
                problems.append(problem)
        return None, problems

    def _by_preference(self, found: FoundShares, part: int) -> list[int]:
        own = self._hosts.indices[part] if found.size == self._mesh.world_size else None
        return sorted(found.holders[part], key=lambda host: host != own)

    def _reader(self, part: int, hosts: Mapping[int, Sequence[int]]) -> int:
        """Return the rank that reads a share from its first host for the others."""
        ranks = self._hosts.ranks_on(hosts[part][0])
        # The ranks of a host take turns, so that each reads about as many shares.
        return ranks[part % len(ranks)]

    def _open_share(self, found: FoundShares, part: int) -> _Share:
        folder = self._root / _share_folder(found, part)
        verify(folder)
        facts = read_facts(folder, found.step)
        return list(saved_boxes(folder, [share_name(part, found.size)])), facts

    def _state(
        self, found: FoundShares, hosts: Mapping[int, Sequence[int]], shares: Mapping[int, _Share]
    ) -> SavedShares:
        """Return the state of verified shares; each rank lists the blocks of its own for the others.

        Equal shapes are sent once, and the other facts are those of the first share.
        """
        own_shapes = {name: shape for _, facts in shares.values() for name, shape in facts.shapes.items()}
        shapes = self._mesh.share(gather_shapes(self._mesh, own_shapes))
        keys = [(part, [(box.key, box.shape) for box in boxes]) for part, (boxes, _) in shares.items()]
        first = replace(shares[0][1], shapes={}).to_json() if 0 in shares else None
        trainings = [digest_of(facts.identity) for _, facts in shares.values()]
        gathered = self._mesh.all_gather((first, keys))
        # Shares of one step may be left from two runs in the same folder.
        if len(set(chain.from_iterable(self._mesh.all_gather(trainings)))) > 1:
            raise ValueError("its shares belong to different trainings")
        facts = replace(Facts.from_json(next(one for one, _ in gathered if one is not None)), shapes=shapes)
        boxes, remote = [], {}
        for part, listed in chain.from_iterable(some for _, some in gathered):
            file = _share_folder(found, part) / share_name(part, found.size)
            boxes += [SavedBox.of_key(file, key, tuple(shape)) for key, shape in listed]
            if hosts[part][0] != self._hosts.own:
                remote[file] = self._reader(part, hosts)
        return SavedShares(self._root, facts, boxes, remote, self._peers)

    def load(self, state: SavedShares, engine: Engine) -> None:
        """See `Tier`. This rank answers questions of other hosts for its files, while all ranks load."""
        if self._peers is None:
            super().load(state, engine)
            return
        with self._peers.serving(state.open_local, self._mesh):
            super().load(state, engine)

    def begin(self, step: int | None, state: Callable[[], EngineState]) -> list[str]:
        """See `Tier`. All checkpoints but that from which the run resumes are removed.

        Raises:
            UsageError: a host has too little memory.
        """
        if self._leads:
            for place in places(self._root):
                CheckpointStore(place, KEPT).keep_only({self.last})
        self._mesh.barrier()  # no rank writes a new share beside an old one of another rank
        # The optimizer may have no state yet, so the first `save` asks again.
        self._require_room(sum(box.view.nbytes for _, box in own_share(state().parts)))
        if step is None:
            return []
        source = "in memory" if self.last is not None else "on the disk; memory holds no newer one that is complete"
        newest = self._disk.name_of_last()
        return [f"resumed from the checkpoint of step {step} {source}; the newest on the disk is {newest}"]

    def _require_room(self, num_bytes: int) -> None:
        """Require memory for two checkpoints, where this rank's share has `num_bytes`."""
        shares = self._mesh.agree_each(num_bytes)
        ranks = self._hosts.ranks_on(self._hosts.own)
        copied = self._hosts.sources_of(ranks)
        # All ranks of this host write here, and so do the ranks that it keeps copies of.
        needed = KEPT * sum(shares[rank] for rank in [*ranks, *copied])

        def check() -> None:
            # The run's own older checkpoints give their memory back before the next ones need it.
            held = sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())
            room, where = room_in(self.folder)
            if needed > room + held:
                copies = f" and copies of {len(copied)}" if copied else ""
                raise UsageError(
                    f"`checkpoint.memory` needs {size(needed)} in {self.folder.parent} of {self._name}, for two"
                    f" checkpoints of its ranks ({len(ranks)}){copies}, but only {size(room + held)} are free {where};"
                    " enlarge it (docker run --shm-size, --memory), use more hosts, or set `checkpoint.memory` to null"
                )

        self._mesh.on_every_rank(check if self._leads else lambda: None)

    def save(self, step: int, snapshot: Snapshot) -> None:
        """See `Tier`.

        Raises:
            UsageError: a host has too little memory.
        """
        self.finish()  # first, so that no two copies of the state are held
        facts, tensors = snapshot()
        if not self._has_room:
            self._require_room(sum(tensor.nbytes for tensor in tensors.values()))
            self._has_room = True
        self._writing = facts, Background(partial(self._write, facts, tensors))

    def close(self) -> None:
        self.last = None
        if self._lock is not None:
            self._lock.close()
        if self._leads:
            shutil.rmtree(self._root, ignore_errors=True)
            with suppress(OSError):  # another run of this path, in another container, may use it
                self.folder.rmdir()
        if self._num_failed > 1:
            self._note(f"{self._num_failed} checkpoints in total could not be written to the memory of the hosts")

    @property
    def _name(self) -> str:
        return self._hosts.names[self._mesh.rank]

    @property
    def _leads(self) -> bool:
        return self._hosts.ranks_on(self._hosts.own)[0] == self._mesh.rank

    def _store(self, rank: int) -> CheckpointStore:
        return CheckpointStore(self._root / place_of(rank, self._mesh.world_size), KEPT)

    def _kept_by(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks with shares that some ranks keep."""
        return [*ranks, *self._hosts.sources_of(ranks)]

    def _write(self, facts: Facts, tensors: Mapping[str, Tensor]) -> None:
        """Write this rank's share and the copies that it keeps; the memory of older ones is freed before."""
        step, rank, own = facts.progress.step, self._mesh.rank, self._store(self._mesh.rank)
        name = share_name(rank, self._mesh.world_size)
        error: Exception | None = None
        try:
            self._begin(own, step)
            folder = own.unfinished_path(step)
            seal(folder, facts, [write_share(folder, name, tensors)])
            # The share is renamed before the other ranks have written theirs: a checkpoint is complete by the number of
            # its shares.
            own.adopt(step)
        except Exception as raised:
            error = raised  # the other ranks still wait for this one
        if self._peers is not None:
            # After an error too: the receiver waits for the sizes, which then say that files are missing.
            sent = self._peers.begin_send_share(own.path(step), name, self._hosts.target_of(rank))
            for source in self._hosts.sources_of([rank]):
                store, name = self._store(source), share_name(source, self._mesh.world_size)
                try:
                    self._peers.take_share(partial(self._begin, store, step), store, step, name, source)
                except Exception as raised:
                    error = error or raised
            for work in sent:
                work.wait()
        if error is not None:
            raise error

    def _begin(self, store: CheckpointStore, step: int) -> None:
        claim(self.folder)  # again, if a cleaner has removed it
        # Before the next share, so that a host holds two checkpoints at most.
        store.keep_only({self.last})
        begin_share(self.folder, store, step)

    def _complete(self, facts: Facts, writing: Background[None]) -> None:
        if self._leads:
            kept = self._kept_by(self._hosts.ranks_on(self._hosts.own))
            names = {place_of(rank, self._mesh.world_size) for rank in kept}
            for place in places(self._root):
                if place.name not in names:  # of another layout, or of a rank that has moved to another host
                    shutil.rmtree(place, ignore_errors=True)

    def _fail(self, step: int, writing: Background[None]) -> None:
        writing.wait()  # after a failure of another rank, this one may still write
        for rank in self._kept_by([self._mesh.rank]):
            self._store(rank).discard(step)
            self._store(rank).keep_only({self.last})
        error = writing.error
        is_consequence = isinstance(error, FileNotFoundError)  # another rank had nothing to send
        failure = (is_consequence, f"rank {self._mesh.rank} on {self._name}: {error}") if error else None
        # False sorts first: a cause comes before its consequences.
        failures = sorted(one for one in self._mesh.gather(failure) or [] if one)
        self._num_failed += bool(failures)  # on rank 0
        if failures and self._num_failed == 1:  # `close` shows the number of all
            self._note(
                f"the checkpoint of step {step} could not be written to the memory in {self.folder}:"
                f" {failures[0][1]}; training continues, and the next one will be tried"
            )


def _share_folder(found: FoundShares, part: int) -> Path:
    return CheckpointStore(Path(place_of(part, found.size)), KEPT).path(found.step)
