"""Which processes are the ranks now, where the store that they share has seen others before them.

torch's elastic agent keeps its store when it starts ranks again, and what the earlier ones said is still in it. How
often they were started cannot tell one start from the next: agents of several machines count each for itself. So each
process has a name of its own, and rank 0 reads out the names until every one of them has answered.
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
    """The search for the processes that are the ranks now.

    Args:
        store: that the ranks share, and perhaps shared with those before them.
        rank: of this process.
        size: how many ranks there are.
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
        """What names this start alone, the same on all ranks; None: not all have answered.

        Args:
            until: of the monotonic clock.

        Raises:
            TrainerError: another process has come as this rank.
        """
        return self._roll if came_true(self._is_complete, until) else None

    def missing(self) -> list[int] | None:
        """The ranks that have not come, or of which only an earlier process did.

        None: rank 0 is one of them, and so nobody can tell of the others; it would have read out the name of this one.
        """
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
            self._read_out_names()
        else:
            self._answer()
        return self._roll != "" and self._store.check([f"{self._roll}/complete"])

    def _read_out_names(self) -> None:
        """Does so where all have come, again where a name has changed, and ends the roll call when all answered."""
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


def came_true(is_so: Callable[[], bool], until: float) -> bool:
    """Waits until the store says so, or for that time of the monotonic clock.

    By asking again and again: torch's own wait takes twice its time to end, and logs that it did.
    """
    pause = 0.002
    while not is_so():
        if time.monotonic() >= until:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    return True


def two_processes(rank: int) -> TrainerError:
    """The error of one of them; no user's for sure: where the run before has to end, another start helps."""
    return TrainerError(
        f"two processes were started as rank {rank}, one of them on {socket.gethostname()}; give each machine a number"
        " of its own (NODE_RANK, --node-rank or --machine_rank), and each run a port, or start again when the run"
        " before has ended"
    )


def _process(rank: int) -> str:
    return f"process/{rank}"
