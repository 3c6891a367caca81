"""Ranks find each other in a store that remembers those who were the ranks before."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
from torch.distributed import HashStore

from trainer.base.errors import TrainerError
from trainer.ranks.roll_call import RollCall

SIZE = 3


def start(store: HashStore, ranks: Sequence[int] = range(SIZE), seconds: float = 5.0) -> list[str | None]:
    """What new processes of these ranks find, each in a thread."""
    found: dict[int, str | None] = {}

    def run(rank: int) -> None:
        found[rank] = RollCall(store, rank, SIZE).wait(time.monotonic() + seconds)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [found[rank] for rank in ranks]


def test_each_start_has_a_name_of_its_own():
    store = HashStore()
    rolls = [start(store) for _ in range(3)]
    assert all(None not in roll and len(set(roll)) == 1 for roll in rolls)
    assert len({roll[0] for roll in rolls}) == 3


@pytest.mark.parametrize("rank", range(SIZE))
def test_ranks_of_an_earlier_attempt_do_not_count(rank):
    """One of them has not been started again yet, whoever it is."""
    store = HashStore()
    start(store)
    others = [other for other in range(SIZE) if other != rank]
    assert start(store, others, 0.3) == [None, None]
    waiting = RollCall(store, others[0], SIZE)
    assert waiting.wait(time.monotonic() + 0.1) is None
    missing = waiting.missing()
    assert missing is None if rank == 0 else rank in missing


def test_without_rank_0_no_rank_is_counted():
    """Rank 0 and another one of before are still in the store."""
    store = HashStore()
    start(store)
    last = RollCall(store, 2, SIZE)
    assert last.wait(time.monotonic() + 0.05) is None
    assert last.missing() is None


def test_one_that_is_started_again_while_the_others_wait():
    store = HashStore()
    first = RollCall(store, 0, SIZE)
    second = RollCall(store, 1, SIZE)
    assert first.missing() == [2]
    lost = RollCall(store, 2, SIZE)
    assert first.wait(time.monotonic() + 0.05) is None  # it reads out the names of all
    assert lost.wait(time.monotonic() + 0.05) is None  # which answers, and is killed
    assert first.missing() == [1]
    third = RollCall(store, 2, SIZE)
    found: list[str | None] = []
    threads = [
        threading.Thread(target=lambda call=call: found.append(call.wait(time.monotonic() + 5)))
        for call in (first, second, third)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == SIZE
    assert found[0] is not None
    assert len(set(found)) == 1


def test_who_is_missing():
    store = HashStore()
    last = RollCall(store, 2, SIZE)
    assert last.missing() == [0, 1]
    RollCall(store, 1, SIZE)
    assert last.missing() == [0]
    first = RollCall(store, 0, SIZE)
    assert last.missing() is None, "it is there, and has not read out the names"
    first.wait(time.monotonic())
    last.wait(time.monotonic())
    assert first.missing() == last.missing() == [1]


def test_two_processes_of_one_rank():
    store = HashStore()
    older = RollCall(store, 1, SIZE)
    RollCall(store, 1, SIZE)
    with pytest.raises(TrainerError, match=r"two processes were started as rank 1, .*NODE_RANK"):
        older.wait(time.monotonic() + 1)
