"""The current processes of the ranks, in a store that may hold values of earlier processes.

torch's elastic agent keeps its store when it starts ranks again. The number of restarts cannot identify a start,
because the agents of several machines count separately. So each process has a random name, and rank 0 publishes the
names until every process has answered.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable

from torch.distributed import Store  # type: ignore[attr-defined]

from trainer.base.errors import TrainerError

_LONGEST_PAUSE_SECONDS = 0.25  # between two questions to the store


class RollCall:
    """The search for the current processes of the ranks.

    Args:
        store: store of the ranks, possibly with values of earlier processes.
        rank: of this process.
        size: number of ranks.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._own = secrets.token_hex(8)
        self._names: list[str] = []
        self._roll = ""
        store.set(_process(rank), self._own)

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
        absent = [rank for rank in range(self._size) if not self._store.check([_process(rank)])]
        if absent:
            return absent
        if not self._roll:
            return None
        return [rank for rank in range(self._size) if not self._store.check([f"{self._roll}/{rank}"])]

    def _is_complete(self) -> bool:
        if self._store.get(_process(self._rank)).decode() != self._own:
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
        if names != self._names:
            self._names, self._roll = names, secrets.token_hex(8)
            self._store.set("roll", json.dumps([self._roll, names]))
        self._store.set(f"{self._roll}/0", "")
        if not self.missing():
            self._store.set(f"{self._roll}/complete", "")

    def _answer(self) -> None:
        if not self._store.check(["roll"]):
            return
        roll, names = json.loads(self._store.get("roll"))
        if roll != self._roll and self._own in names:
            self._roll = roll
            self._store.set(f"{roll}/{self._rank}", "")


def wait_until(condition: Callable[[], bool], until: float) -> bool:
    """Poll a condition until that time of the monotonic clock; returns whether it held.

    torch's own wait takes twice its timeout and logs a warning.
    """
    pause = 0.002
    while not condition():
        if time.monotonic() >= until:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    return True


def two_processes(rank: int) -> TrainerError:
    """Return the error of a rank that exists twice; not a user's error, because an earlier run may only have to end."""
    return TrainerError(
        f"two processes were started as rank {rank}, one of them on {socket.gethostname()}; give each machine a number"
        " of its own (NODE_RANK, --node-rank or --machine_rank), and each run a port, or start again when the run"
        " before has ended"
    )


def _process(rank: int) -> str:
    return f"process/{rank}"
