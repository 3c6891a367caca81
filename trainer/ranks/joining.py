"""Rendezvous of the ranks before they have a process group: one store, at the address that the launcher gave.

The number of messages of a rank does not depend on the number of ranks; rank 0 alone reads values of all ranks. If the
rendezvous fails, every rank ends in bounded time. Its error names address and port, the ranks that have come, and the
answer of the network. The module knows the launcher's variables and no recipe.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from trainer.base.errors import ExitCode, LaunchError, LostPeerError, TrainerError, UsageError
from trainer.base.terminal import say
from trainer.base.text import for_terminal, listed
from trainer.base.waiting import wait_until
from trainer.ranks.environment import GLOO_INTERFACE, LaunchEnvironment, gloo_interface, use_gloo_interface
from trainer.ranks.interfaces import address_of, interface_of, interfaces, is_loopback, listening_address, route_to
from trainer.ranks.messages import decode, encode
from trainer.ranks.roll_call import RollCall, enter, ranks_missing, two_processes

Result = TypeVar("Result")

_NOTICE_SECONDS = 20.0  # until a waiting rank shows a notice
_AFTER_TORCH_SECONDS = 10.0
_ATTEMPT_SECONDS = 5.0  # for one connection
_RETRY_SECONDS = 0.25
_BACKLOG = 4096  # all ranks may connect at once
_READ_SECONDS = 5.0  # for the other ranks to read an error, if this rank serves the store


def join_ranks(environment: LaunchEnvironment, timeout_seconds: float) -> Rendezvous:
    """Wait for all ranks.

    Args:
        timeout_seconds: limit until the last rank has come.

    Raises:
        LaunchError: the port is taken, or the ranks or their number contradict each other.
        TrainerError: rank 0 cannot be reached, or ranks did not come.
    """
    deadline = time.monotonic() + timeout_seconds
    with _bounded(environment, timeout_seconds + _AFTER_TORCH_SECONDS):
        # Either torch's elastic agent serves the store, which outlives the ranks, or rank 0 does.
        hosts_store = environment.rank == 0 and not environment.has_agent_store
        # A connection of our own comes first, because torch's store does not say why it cannot connect.
        own_address = None if hosts_store else _reach(environment, deadline)
        store = _store(environment, hosts_store, max(1.0, deadline - time.monotonic()))
        with lost_store():
            if environment.has_agent_store:  # it may hold values of earlier starts
                roll_call = RollCall(store, environment.rank, environment.world_size)
                this_start = _await_all(environment, deadline, roll_call.wait, roll_call.missing)
                store = PrefixStore(this_start, store)
            rendezvous = Rendezvous(store, environment, hosts_store, own_address)
            rendezvous.arrive(deadline)
    return rendezvous


class Rendezvous:
    """Communication of ranks without a process group. All ranks must call the same methods in the same order.

    Args:
        hosts_store: whether the store ends with this process.
        own_address: address of this machine in its connection to the store.
    """

    def __init__(
        self, store: Store, environment: LaunchEnvironment, hosts_store: bool = False, own_address: str | None = None
    ) -> None:
        self.store = store
        self._environment = environment
        self.hosts_store = hosts_store
        self._size = environment.world_size
        self._own_address = own_address
        self._questions = 0

    def arrive(self, deadline: float) -> None:
        """Wait for all ranks until that time of the monotonic clock.

        Raises:
            LaunchError: the ranks were started with different world sizes.
            TrainerError: two processes are the same rank, or not all came.
        """
        environment = self._environment
        # The first rank sets the size, and the others read that of the first.
        size = self.store.compare_set("size", "", str(self._size)).decode()
        if size != str(self._size):
            raise LaunchError(
                f"all ranks must have the same world size, but rank {environment.rank} on {socket.gethostname()} was"
                f" started as one of {self._size}, and the first one at {_place(environment)} as one of {size}; end the"
                " ranks of earlier starts, or give this run a port of its own"
            )
        # `add` is atomic: of two processes with the same rank, the second one learns of the first.
        if self.store.add(f"here/{environment.rank}", 1) > 1:
            raise two_processes(environment.rank)
        enter(self.store, "here", environment.rank)
        self._count("arrived")
        _await_all(environment, deadline, lambda until: self._wait_for_all("arrived", until) or None, self._missing)

    def together(self, action: Callable[[], Result], timeout_seconds: float) -> Result:
        """Run `action` on all ranks; returns this rank's result when all have finished.

        Args:
            timeout_seconds: limit for the other ranks after this rank has finished.

        Raises:
            TrainerError: the error of the rank that failed, on all ranks.
        """
        # Each exchange has keys of its own, so that a fast rank overwrites nothing that a slow one has still to read.
        name = self._next_question()
        try:
            result = action()
        except Exception as error:
            code = error.exit_code if isinstance(error, TrainerError) else ExitCode.FAILED
            text = str(error) if isinstance(error, TrainerError) else f"{type(error).__name__}: {error}"
            with suppress(dist.DistError):  # the store has ended with its rank
                self._put(f"{name}/problem", [int(code), self._signed(text)])
                # It ends the wait of the other ranks, which then look for a problem.
                self.store.set(f"{name}/all", "")
                self._wait_for_readers(name)
            # A batch system may show the message of any rank, so this one names rank and machine too.
            if isinstance(error, TrainerError) and self._environment.num_nodes > 1:
                raise _error(code, self._signed(text)) from error
            raise
        with lost_store():
            self._count(name)
            if not self._wait_for_all(name, time.monotonic() + timeout_seconds):
                raise TrainerError(
                    f"rank {self._environment.rank} waited {timeout_seconds:g} seconds for the others, which have"
                    " neither finished nor failed; if they still prepare the data, raise `parallel.stall_timeout`,"
                    " or let all machines share `data.cache`"
                )
            if self.store.check([f"{name}/problem"]):
                code, text = decode(self.store.get(f"{name}/problem"))
                self._wait_for_readers(name)
                # Only now: if the store ends with this rank, the others have read the error.
                raise _error(ExitCode(code), text)
        return result

    def gather(self, value: Any, timeout_seconds: float) -> list[Any] | None:
        """Return the `value` of every rank, in order of rank, on rank 0; None on the others.

        Raises:
            TrainerError: a rank has exited.
        """
        rank = self._environment.rank

        def read(name: str) -> list[Any] | None:
            # Rank 0 asks once for all values, so its messages do not grow with the ranks.
            keys = [f"{name}/{number}" for number in range(self._size)]
            return [decode(message) for message in self.store.multi_get(keys)] if rank == 0 else None

        return self._exchange(lambda name: self._put(f"{name}/{rank}", value), read, timeout_seconds)

    def share(self, value: Any, timeout_seconds: float) -> Any:
        """Return rank 0's `value` on every rank.

        Raises:
            TrainerError: a rank has exited.
        """

        def put(name: str) -> None:
            if self._environment.rank == 0:
                self._put(f"{name}/value", value)

        return self._exchange(put, lambda name: decode(self.store.get(f"{name}/value")), timeout_seconds)

    def all_same(self, text: str, timeout_seconds: float) -> bool:
        """Return whether all ranks gave the same text, on every rank.

        Raises:
            TrainerError: a rank has exited.
        """

        def compare(name: str) -> None:
            # Each rank compares its text with that of the first one to come, so none reads the texts of all.
            if self.store.compare_set(f"{name}/first", "", text).decode() != text:
                self.store.set(f"{name}/differ", "")

        return self._exchange(compare, lambda name: not self.store.check([f"{name}/differ"]), timeout_seconds)

    def _exchange(self, put: Callable[[str], object], read: Callable[[str], Result], timeout_seconds: float) -> Result:
        """Let all ranks put values under a name, and read them when all have."""
        name = self._next_question()
        self.together(lambda: put(name), timeout_seconds)
        with lost_store():
            answer = read(name)
            self._wait_for_readers(name)  # a rank may leave next, and the store with it
        return answer

    def require_network(self, timeout_seconds: float) -> None:
        """Choose the interface for gloo, and check that each machine can connect to the next one.

        By default gloo uses the address of the host's name, which is often a loopback address or in another network.
        On one machine it must use the loopback interface, which no other machine can reach. On several machines the
        interface that leads to the store is known to work. `GLOO_SOCKET_IFNAME` overrides both.

        Raises:
            LaunchError: an interface that is not there, or ranks of a machine that do not follow each other.
            TrainerError: machines do not reach each other.
        """
        environment = self._environment
        if environment.num_nodes == 1:
            loopback = interface_of("127.0.0.1")
            if gloo_interface() is None and loopback is not None:
                use_gloo_interface(loopback)
            return

        def name_own_address() -> None:
            if self._own_address is not None and not is_loopback(self._own_address):
                # An address of another machine, by which rank 0's machine finds the interface that leads to others.
                self.store.compare_set("outside", "", self._own_address)

        self.together(name_own_address, timeout_seconds)
        with ExitStack() as stack:
            # Three rounds: all ranks listen, then all know all places, and then they connect while all sockets are
            # open.
            mine = self.together(lambda: self._listen(stack), timeout_seconds)
            self.together(lambda: self._require_order(mine), timeout_seconds)
            self.together(lambda: self._reach_next(mine), timeout_seconds)

    def _require_order(self, mine: _Peer) -> None:
        """Refuse ranks of one machine that do not follow each other: shard and tensor groups would cross machines."""
        rank = self._environment.rank
        before = self._peer(rank - 1) if rank else None
        place = (mine.host, mine.local_rank - 1)
        if mine.local_rank and (before is None or (before.host, before.local_rank) != place):
            was = f"rank {rank - 1} is number {before.local_rank} on {before.host}" if before else "is the first one"
            raise LaunchError(
                f"the ranks of a machine must follow each other, but rank {rank} is number {mine.local_rank} on"
                f" {mine.host} and {was};"
                " assign ranks in blocks (`srun --distribution=block`)"
            )

    def _reach_next(self, mine: _Peer) -> None:
        """Connect from the first rank of each machine to that of the next one."""
        environment = self._environment
        if environment.local_rank:
            return
        rank = (environment.rank + environment.local_world_size) % self._size
        while (peer := self._peer(rank)).local_rank:  # this machine has more ranks than its launcher declared
            rank = (rank + 1) % self._size
        if rank != environment.rank:
            _require_reachable(mine, peer, rank)

    def _peer(self, rank: int) -> _Peer:
        return _Peer(*decode(self.store.get(f"peer/{rank}")))

    def _listen(self, stack: ExitStack) -> _Peer:
        """Listen on the interface for gloo, on a port that the system chooses, and publish the place."""
        environment = self._environment
        name = gloo_interface()
        if name is None:
            address = self._own_address
            if address is None or is_loopback(address):  # rank 0's machine: use the route to another
                outside = self.store.get("outside").decode() if self.store.check(["outside"]) else None
                address = route_to(outside) if outside else "127.0.0.1"
            name = interface_of(address)
            if name is None:
                raise LaunchError(
                    f"no interface of {socket.gethostname()} has the address {address}, which leads to"
                    f" {environment.master_addr}; set {GLOO_INTERFACE} to one of {interfaces()}"
                )
            use_gloo_interface(name)
        address = address_of(name)
        port = 0
        if environment.local_rank == 0:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            port = stack.enter_context(socket.create_server((address, 0), family=family)).getsockname()[1]
        mine = _Peer(socket.gethostname(), environment.local_rank, name, address, port, interfaces())
        self._put(f"peer/{environment.rank}", list(astuple(mine)))
        return mine

    def _put(self, key: str, value: Any) -> None:
        self.store.set(key, encode(value))  # type: ignore[arg-type]  # torch's stub omits bytes

    def _next_question(self) -> str:
        self._questions += 1
        return f"question/{self._questions}"

    def _count(self, name: str) -> None:
        # The last rank sets the key for which the others wait, so that none of them reads the counter.
        if self.store.add(f"{name}/count", 1) == self._size:
            self.store.set(f"{name}/all", "")

    def _wait_for_all(self, name: str, until: float) -> bool:
        """Wait until all ranks were counted, or one has failed; return false at that time of the monotonic clock."""
        return wait_until(lambda: self.store.check([f"{name}/all"]), until)

    def _missing(self) -> list[int]:
        return ranks_missing(self.store, "here", self._size)

    def _wait_for_readers(self, name: str) -> None:
        """Count the ranks that have read the values; wait for all of them if the store ends with this process."""
        self.store.add(f"{name}/known", 1)
        if self.hosts_store:
            self._wait_for_count(f"{name}/known", self._size)

    def _wait_for_count(self, key: str, number: int) -> None:
        wait_until(lambda: self.store.add(key, 0) >= number, time.monotonic() + _READ_SECONDS)

    def _signed(self, text: str) -> str:
        """Name rank and machine, if there are several machines."""
        environment = self._environment
        return text if environment.num_nodes == 1 else f"rank {environment.rank} on {socket.gethostname()}: {text}"


@dataclass(frozen=True)
class _Peer:
    host: str
    local_rank: int
    interface: str
    address: str
    port: int  # 0: another rank of its machine listens
    interfaces: str


def _require_reachable(mine: _Peer, other: _Peer, rank: int) -> None:
    problem = _connection_problem(other.address, other.port, 2 * _ATTEMPT_SECONDS)[1]
    if problem:
        raise TrainerError(
            f"its interface {mine.interface} ({mine.address}) cannot connect to rank {rank} on {other.host} at"
            f" {other.address}:{other.port} ({problem}): ranks connect to each other on ports of the system's choice,"
            f" so open all ports between the machines; or set {GLOO_INTERFACE} and NCCL_SOCKET_IFNAME on each machine"
            f" to the interface that leads to the others: {mine.host} has {mine.interfaces}; {other.host} has"
            f" {other.interfaces}"
        )


def _reach(environment: LaunchEnvironment, deadline: float) -> str:
    """Wait until the store accepts connections; returns the address of this machine in the connection."""
    notice = time.monotonic() + _NOTICE_SECONDS
    while True:
        left = deadline - time.monotonic()
        own_address, problem = _connection_problem(
            environment.master_addr, environment.master_port, max(0.1, min(_ATTEMPT_SECONDS, left))
        )
        if own_address is not None:
            return own_address
        now = time.monotonic()
        if now >= deadline:
            raise TrainerError(_not_met(environment, problem))
        if now >= notice:
            say(
                f"rank {environment.rank} on {socket.gethostname()} cannot reach {_place(environment)} yet: {problem}",
                err=True,
            )
            # The notice comes once.
            notice = deadline
        time.sleep(_RETRY_SECONDS)


def _connection_problem(host: str, port: int, timeout_seconds: float) -> tuple[str | None, str]:
    """Try to connect; returns the address of this machine in the connection, or None and the problem."""
    try:
        with socket.create_connection((host, port), timeout_seconds) as connection:
            return str(connection.getsockname()[0]), ""
    except socket.gaierror:
        return None, f"the host name {host} cannot be resolved"
    except TimeoutError:
        return None, "no answer: a firewall drops the packets, or the host is down"
    except ConnectionRefusedError:
        return None, "refused: that host answers, but nothing listens on the port"
    except OSError as error:
        return None, error.strerror or str(error)


def _store(environment: LaunchEnvironment, hosts_store: bool, timeout_seconds: float) -> Store:
    """Open the store; rank 0 serves it on a socket of ours, because torch's own would listen on every interface."""
    listener = None
    if hosts_store:
        listener = environment.listen_fd if environment.listen_fd is not None else _listen_for_ranks(environment)
    try:
        return TCPStore(
            environment.master_addr,
            environment.master_port,
            environment.world_size,
            is_master=hosts_store,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,  # `arrive` waits, and names the ranks that are missing
            master_listen_fd=listener,
        )
    except dist.DistError as error:
        raise TrainerError(_not_met(environment, str(error).splitlines()[0])) from error


def _listen_for_ranks(environment: LaunchEnvironment) -> int:
    address = listening_address(environment.master_addr, one_machine=environment.num_nodes == 1)
    # Without one certain address, the socket takes IPv4 and IPv6.
    both = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in address else socket.AF_INET
    try:
        return socket.create_server(
            (address, environment.master_port), family=family, backlog=_BACKLOG, dualstack_ipv6=both
        ).detach()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(
                f"MASTER_PORT is {environment.master_port}, but another program has that port of"
                f" {socket.gethostname()}; set it to a free port, the same for all ranks"
            ) from error
        raise TrainerError(_not_met(environment, error.strerror or str(error))) from error


@contextmanager
def lost_store(text: str = "another rank exited before all were ready; its message gives the reason") -> Iterator[None]:
    """Convert errors of a store that has ended with its rank or agent to an error with `text`."""
    try:
        yield
    except dist.DistError as error:
        raise LostPeerError(text) from error


def _await_all(
    environment: LaunchEnvironment,
    deadline: float,
    wait: Callable[[float], Result | None],
    missing: Callable[[], list[int] | None],
) -> Result:
    """Wait for all ranks, with a notice after some time that names the missing ones.

    Args:
        deadline: of the monotonic clock.
        wait: function that waits until a time; it returns None if ranks are missing.
        missing: function that returns the missing ranks; None: rank 0 and possibly others.
    """
    # First until the notice, then until the limit.
    for until in (min(time.monotonic() + _NOTICE_SECONDS, deadline), deadline):
        answer = wait(until)
        if answer is not None:
            return answer
        absent = missing()
        if absent is None:  # one notice for each machine: the other ranks are unknown
            speaks = environment.local_rank == 0
        else:
            speaks = environment.rank == min(set(range(environment.world_size)) - set(absent), default=0)
        if until < deadline and speaks:
            say(f"{_missing_text(absent, environment.world_size)} yet at {_place(environment)}; waiting", err=True)
    raise TrainerError(
        f"rank {environment.rank} on {socket.gethostname()} waited at {_place(environment)}, but"
        f" {_missing_text(missing(), environment.world_size)}; check that they were started, with MASTER_ADDR"
        f" {environment.master_addr} and MASTER_PORT {environment.master_port}, and that this port of that host is open"
        " to them; `parallel.join_timeout` sets the limit"
    )


@contextmanager
def _bounded(environment: LaunchEnvironment, seconds: float) -> Iterator[None]:
    """End this process after that time: torch's store waits forever for a program that never answers on the port."""
    # A thread, because torch's call does not return to Python, where a signal would be handled.
    timer = threading.Timer(seconds, _give_up, (environment,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_up(environment: LaunchEnvironment) -> None:
    os.write(sys.stderr.fileno(), for_terminal(f"error: {_not_met(environment, 'no answer')}\n").encode())
    # The main thread hangs inside of torch, where no exception of this thread reaches it.
    os._exit(ExitCode.FAILED)


def _not_met(environment: LaunchEnvironment, problem: str) -> str:
    return (
        f"rank {environment.rank} on {socket.gethostname()} could not join the others at {_place(environment)}"
        f" ({problem}); check that MASTER_ADDR is the machine of rank 0, that rank 0 was started, that the port is open"
        " to this machine, and that no other program has it; `parallel.join_timeout` sets the limit"
    )


def _place(environment: LaunchEnvironment) -> str:
    return f"{environment.master_addr}:{environment.master_port}"


def _missing_text(missing: list[int] | None, size: int) -> str:
    if missing is None:
        return "rank 0, which lists the ranks, has not joined"
    ranks = listed(missing, 8)
    return f"only {size - len(missing)} of {size} ranks have joined, without rank{'s' * (len(missing) > 1)} {ranks}"


def _error(code: ExitCode, text: str) -> TrainerError:
    """Return another rank's error as this rank raises it: the user's, or a consequence."""
    return UsageError(text) if code == ExitCode.USER else LostPeerError(text)
