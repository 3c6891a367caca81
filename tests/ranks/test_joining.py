"""The rendezvous: errors of ranks that cannot meet, and errors of one rank on all ranks."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import pytest
from torch.distributed import HashStore, TCPStore

from tests.helpers import processes
from tests.launch.test_launchers import free_port
from trainer.base.errors import DataError, ExitCode, LaunchError, LostPeerError, TrainerError, UsageError
from trainer.ranks import interfaces, joining
from trainer.ranks.environment import LaunchEnvironment
from trainer.ranks.interfaces import is_loopback, listening_address
from trainer.ranks.joining import Rendezvous, join_ranks
from trainer.ranks.roll_call import RollCall
from trainer.recipe.schema import Parallel
from trainer.training.agreement import require_agreement

ALONE = LaunchEnvironment("torchrun", has_agent_store=True)
RANK = LaunchEnvironment("variables", 0, 0, 2, 2, "127.0.0.1", 29500)


def on_ranks(action: Callable[[Rendezvous], Any], size: int = 2, nodes: int = 1) -> list[Any]:
    """What `action` gives, or raises, for each of several ranks that have met, each in a thread."""
    store, results = HashStore(), [None] * size

    def run(rank: int) -> None:
        local_size = size // nodes
        own = replace(RANK, rank=rank, local_rank=rank % local_size, world_size=size, local_world_size=local_size)
        try:
            results[rank] = action(Rendezvous(store, own))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def rank_of(rendezvous: Rendezvous) -> int:
    return rendezvous._environment.rank


class CountingStore:
    """A store with the questions of one rank, each once, however often it is asked, and the bytes of the answers.

    The rank that is counted last tells all others; that message is left out, because any rank may be the last.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self.answers: dict[tuple[str, str], int] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(keys: Any, *args: Any) -> Any:
            answer = getattr(self._store, name)(keys, *args)
            for key in [keys] if isinstance(keys, str) else keys:
                if name != "set" or not key.endswith("/all"):
                    self.answers[name, key] = len(answer) if isinstance(answer, bytes) else 0
            return answer

        return ask


def counted_meeting(rendezvous: Rendezvous, differ: bool) -> tuple[int, int]:
    """Meet as at the start of a run; returns this rank's number of messages, and the bytes that it has read."""
    own = rendezvous._environment
    store: Any = CountingStore(rendezvous.store)
    rendezvous.store = store
    assert RollCall(store, own.rank, own.world_size).wait(time.monotonic() + 20)
    rendezvous.arrive(time.monotonic() + 20)
    facts = {"torch": "2.9" if differ and own.rank == 1 else "2.10", "`model.config`": "x" * 1000}
    with pytest.raises(UsageError, match=r"torch is 2\.10 on") if differ else nullcontext():
        require_agreement(facts, rendezvous, 20)
    rendezvous.require_network(20)
    rendezvous.together(lambda: None, 20)
    return len(store.answers), sum(store.answers.values())


@pytest.mark.parametrize("differ", [False, True])
def test_the_messages_of_a_rank_do_not_grow_with_the_number_of_ranks(monkeypatch, differ):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    sizes = (4, 8, 16)
    counts = {size: on_ranks(partial(counted_meeting, differ=differ), size, nodes=2) for size in sizes}
    most = [max(number for number, _ in counts[size][1:]) for size in sizes]
    assert max(most) - min(most) <= 1, "one more on a rank whose facts are not those of the first that asked"
    first = [counts[size][0][0] for size in sizes]
    assert first[1] - first[0] <= 10 * 4, "rank 0 alone asks for each rank"
    assert first[2] - first[1] <= 10 * 8, "and not for each pair of ranks"
    assert max(num_bytes for _, num_bytes in counts[16][1:]) < (4000 if differ else 500)


def test_ranks_gather_and_do_things_together():
    def act(rendezvous: Rendezvous) -> Any:
        rendezvous.arrive(time.monotonic() + 5)
        rank = rank_of(rendezvous)
        return (
            rendezvous.gather({"rank": rank}, 5),
            rendezvous.share({"of": rank}, 5),
            [rendezvous.all_same(text, 5) for text in ("same", str(rank // 2), "same again")],
            rendezvous.together(lambda: rank * 2, 5),
        )

    everyone, agreed = [{"rank": rank} for rank in range(3)], [True, False, True]
    assert on_ranks(act, 3) == [(None if n else everyone, {"of": 0}, agreed, 2 * n) for n in range(3)]


def test_a_refusal_of_one_rank_is_reported_to_all():
    def act(rendezvous: Rendezvous) -> Any:
        def prepare() -> str:
            if rank_of(rendezvous) == 1:
                raise DataError("`data.train` must hold json")
            return "data"

        return rendezvous.together(prepare, 5)

    first, second = on_ranks(act)
    assert (type(first), str(first)) == (UsageError, "`data.train` must hold json")
    assert (type(second), str(second)) == (DataError, "`data.train` must hold json")
    told = [str(error) for error in on_ranks(act, nodes=2)]
    assert told == [f"rank 1 on {socket.gethostname()}: `data.train` must hold json"] * 2


def test_a_bug_of_one_does_not_leave_the_others_waiting():
    def act(rendezvous: Rendezvous) -> Any:
        return rendezvous.together(lambda: 1 // rank_of(rendezvous), 5)

    first, second = on_ranks(act)
    assert isinstance(first, ZeroDivisionError)
    assert isinstance(second, TrainerError)
    assert "ZeroDivisionError" in str(second)
    assert second.exit_code is ExitCode.FAILED


def test_one_that_does_not_come_is_named():
    def act(rendezvous: Rendezvous) -> Any:
        if rank_of(rendezvous) != 1:
            rendezvous.arrive(time.monotonic() + 0.3)

    first, _, third = on_ranks(act, 3)
    for error in (first, third):
        assert "at 127.0.0.1:29500, but only 2 of 3 ranks have joined, without rank 1; check" in str(error)


def test_two_processes_of_one_rank():
    store = HashStore()
    store.add("here/0", 1)
    with pytest.raises(TrainerError, match=r"two processes were started as rank 0, .*NODE_RANK"):
        Rendezvous(store, RANK).arrive(time.monotonic() + 1)


def test_ranks_with_different_world_sizes_are_refused():
    store = HashStore()
    store.set("size", "4")
    with pytest.raises(LaunchError, match=r"rank 0 on .* was started as one of 2, .* as one of 4"):
        Rendezvous(store, RANK).arrive(time.monotonic() + 1)


def test_ranks_of_a_machine_must_follow_each_other(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def act(rendezvous: Rendezvous) -> Any:
        own = rendezvous._environment  # in the order that `srun --distribution=cyclic` gives
        rendezvous._environment = replace(own, local_rank=own.rank // 2)
        rendezvous.arrive(time.monotonic() + 5)
        rendezvous.require_network(5)

    for error in on_ranks(act, 4, nodes=2):
        assert isinstance(error, UsageError)
        assert "the ranks of a machine must follow each other, but rank 3 is number 1" in str(error)


def test_ranks_that_an_agent_starts_again_meet_in_the_store_of_before():
    """torchrun --max-restarts: its store, and what the first ranks left there, outlives them."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for start in (0, 1):
        assert join_ranks(replace(ALONE, master_port=store.port), 5).gather(start, 5) == [start]


def test_a_store_that_goes_while_ranks_meet():
    """The agent that had it has ended, because its own rank was refused."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank = replace(RANK, rank=1, local_rank=1, master_port=store.port, has_agent_store=True)
    raised: list[Exception] = []

    def come() -> None:
        try:
            join_ranks(rank, 20)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=come)
    thread.start()
    store.get("process/1")  # it is there, and waits
    del store
    thread.join(15)
    assert [type(error) for error in raised] == [LostPeerError]


def test_the_store_of_one_machine_listens_on_the_loopback_address():
    place = replace(RANK, master_addr="localhost", master_port=int(free_port()))
    store = joining._store(place, True, 5)
    found = [place.laddr for place in psutil.Process().net_connections() if place.status == psutil.CONN_LISTEN]
    assert [is_loopback(address.ip) for address in found if address.port == place.master_port] == [True]
    del store


def test_the_store_of_several_machines_listens_where_they_connect(monkeypatch):
    monkeypatch.setattr(interfaces, "addresses", lambda: {"lo": ["127.0.0.1"], "eth0": ["192.0.2.1"]})
    assert listening_address("192.0.2.1", one_machine=False) == "192.0.2.1"
    for elsewhere in ("127.0.1.1", "192.0.2.2", "name.invalid"):
        assert listening_address(elsewhere, one_machine=False) == ""


def test_a_taken_port_is_the_users_error():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"MASTER_PORT is {port}, but another program"):
            join_ranks(replace(RANK, master_port=port), 5)


def test_a_closed_port_is_reported():
    port = int(free_port())
    with pytest.raises(TrainerError, match=rf"rank 1 on .* could not join .* 127.0.0.1:{port} \(refused") as error:
        join_ranks(replace(RANK, rank=1, local_rank=1, master_port=port), 0.5)
    assert error.value.exit_code is ExitCode.FAILED


def test_a_program_that_keeps_silent_does_not_hold_a_rank():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        code = (
            "from trainer.ranks import joining; from trainer.ranks.environment import LaunchEnvironment\n"
            "joining._AFTER_TORCH_SECONDS = 0.1\n"
            f"place = '127.0.0.1', {silent.getsockname()[1]}\n"
            "joining.join_ranks(LaunchEnvironment('variables', 1, 1, 2, 2, *place), 0.5)"
        )
        ended = processes.run([sys.executable, "-c", code])
    assert ended.returncode == 1
    assert "error: rank 1 on " in ended.stderr
    assert "could not join the others at 127.0.0.1:" in ended.stderr


def test_a_wrong_address_is_reported_within_a_minute():
    assert joining._NOTICE_SECONDS + joining._ATTEMPT_SECONDS < 60 < Parallel().join_timeout.seconds
