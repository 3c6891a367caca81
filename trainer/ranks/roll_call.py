"""The current processes of the ranks, in a store that may hold values of earlier processes.

torch's elastic agent keeps its store when it starts ranks again. The number of restarts cannot identify a start,
because the agents of several machines count separately. So each process has a random name, and rank 0 publishes the
names until every process has answered. A rank reads its own name only, so its number of messages does not depend on the
number of ranks.
"""

from __future__ import annotations

import secrets
import socket

from torch.distributed import Store  # type: ignore[attr-defined]

from trainer.base.errors import TrainerError
from trainer.base.waiting import wait_until

_ARRIVED = "arrived"


class RollCall:
    """The search for the current processes of the ranks."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._token = secrets.token_hex(8)
        self._names: list[str] = []
        self._roll = ""
        store.set(_process(rank), self._token)
        enter(store, _ARRIVED, rank)

    def wait(self, until: float) -> str | None:
        """Return the name of this start, the same on all ranks; None: not all have answered.

        Args:
            until: time of the monotonic clock.

        Raises:
            TrainerError: another process has come as this rank.
        """
        return self._roll if wait_until(self._is_complete, until) else None

    def missing(self) -> list[int] | None:
        """Return the ranks that have not come, or None if rank 0 is missing: then the others are unknown."""
        if absent := ranks_missing(self._store, _ARRIVED, self._size):
            return absent
        return ranks_missing(self._store, self._answers, self._size) if self._roll else None

    @property
    def _answers(self) -> str:
        return f"{self._roll}/{_ARRIVED}"

    def _is_complete(self) -> bool:
        # A later process with this rank has replaced the name.
        if self._store.get(_process(self._rank)).decode() != self._token:
            raise two_processes(self._rank)
        if self._rank == 0:
            self._publish_names()
        else:
            self._answer()
        return self._roll != "" and self._store.check([f"{self._roll}/complete"])

    def _publish_names(self) -> None:
        """Publish the names when all have come or a name has changed; mark the roll call complete when all answered."""
        keys = [_process(rank) for rank in range(self._size)]
        if not self._store.check(keys):
            return
        names = [name.decode() for name in self._store.multi_get(keys)]
        # A new process has come, so the answers to the earlier roll no longer count.
        if names != self._names:
            self._names, self._roll = names, secrets.token_hex(8)
            keys = [f"{self._roll}/name/{rank}" for rank in range(self._size)]
            self._store.multi_set(keys, names)  # type: ignore[attr-defined]  # torch's stub omits it
            enter(self._store, self._answers, 0)
            self._store.set("roll", self._roll)
        if not self.missing():
            self._store.set(f"{self._roll}/complete", "")

    def _answer(self) -> None:
        if not self._store.check(["roll"]):
            return
        roll = self._store.get("roll").decode()
        # A roll that names an earlier process of this rank is out of date; rank 0 will publish another one.
        if roll != self._roll and self._store.get(f"{roll}/name/{self._rank}").decode() == self._token:
            self._roll = roll
            enter(self._store, self._answers, self._rank)


def ranks_missing(store: Store, key: str, size: int) -> list[int]:
    """Return the ranks below `size` that have not appended their entry to `key`, with two messages."""
    arrived = set(store.get(key).split()) if store.check([key]) else set()
    return [rank for rank in range(size) if str(rank).encode() not in arrived]


def enter(store: Store, key: str, rank: int) -> None:
    """Append the entry of a rank to `key`."""
    store.append(key, f"{rank} ")  # type: ignore[attr-defined]  # torch's stub omits it


def two_processes(rank: int) -> TrainerError:
    """Return the error of a rank that exists twice; not a user's error, because an earlier run may only have to end."""
    return TrainerError(
        f"two processes were started as rank {rank}, one of them on {socket.gethostname()}; give each machine a number"
        " of its own (NODE_RANK, --node-rank or --machine_rank), and each run a port, or start again when the run"
        " before has ended"
    )


def _process(rank: int) -> str:
    return f"process/{rank}"
