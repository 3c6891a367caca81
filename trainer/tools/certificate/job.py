"""The turns of a certificate in a job of torchrun, `accelerate launch` or srun.

The processes of the launcher train nothing. For each layout, those of the first ranks start one process each, which
joins a process group of its own; the others wait. A layout so leaves nothing behind for the next one. Rank 0 leads the
others over one connection each. A connection ends with its process, so that all end if one does.
"""

from __future__ import annotations

import json
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

from trainer.base.errors import (
    INTERRUPTED,
    ExitCode,
    LostPeerError,
    StoppedError,
    TrainerError,
    UsageError,
    error_of_values,
    error_to_values,
)
from trainer.ranks.environment import LaunchEnvironment
from trainer.ranks.interfaces import is_loopback, listening_address
from trainer.ranks.joining import join_ranks
from trainer.recipe.schema import Recipe
from trainer.tools.certificate.result import JobEndedError

_BACKLOG = 4096  # all ranks may connect at once
_CONNECT_SECONDS = 60.0
_PING = (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6))  # a machine without power closes nothing

Turn = Callable[[int, "LaunchEnvironment | None"], None]
"""Trains the layout of a number, as the rank of a place; None: on all ranks."""


class _Line:
    """A connection for lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _PING:
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.connection, self._reader = connection, connection.makefile("rb")

    def send(self, value: Any) -> None:
        self.connection.sendall(json.dumps(value).encode() + b"\n")

    def read(self) -> Any:
        """Return the next line; None: the other process has ended."""
        try:
            line = self._reader.readline()
            return json.loads(line) if line.endswith(b"\n") else None
        except OSError:
            return None

    def close(self) -> None:
        with suppress(OSError):
            self._reader.close()
            self.connection.close()


@dataclass
class Leader:
    """Rank 0 of a job, which starts each turn on all ranks."""

    environment: LaunchEnvironment
    host: str
    followers: dict[int, _Line]  # by their rank
    turn: Turn

    def train(self, number: int, processes: int) -> None:
        """Train a layout on the first ranks of the job.

        Raises:
            JobEndedError: a rank of the job has ended.
            TrainerError: the layout failed on some rank.
            KeyboardInterrupt: a signal.
        """
        port = _free_port(self.host)
        for rank in range(1, processes):
            self._send(rank, [number, processes, self.host, port])
        stopped: BaseException | None = None
        errors: list[TrainerError] = []
        try:
            self.turn(number, _place(self.environment, processes, self.host, port))
        except TrainerError as error:
            errors.append(error)
        except KeyboardInterrupt as error:
            stopped = error
        # All replies first: a rank that was killed stops the others, whose signal is then not the reason.
        for values in self._replies(range(1, processes)):
            if values is not None:
                errors.append(error_of_values(values))
        errors.sort(key=lambda error: isinstance(error, LostPeerError))  # the others lost a rank that names the cause
        if stopped is not None or (errors and errors[0].exit_code == ExitCode.STOPPED):
            raise KeyboardInterrupt from stopped
        if errors:
            raise errors[0]

    def end(self, code: int) -> None:
        """Send the other ranks the exit code."""
        for line in self.followers.values():
            with suppress(OSError):
                line.send(code)

    def _send(self, rank: int, value: Any) -> None:
        try:
            self.followers[rank].send(value)
        except OSError as error:
            raise _lost(rank) from error

    def _replies(self, ranks: Sequence[int]) -> Iterator[Any]:
        # The connections of waiting ranks too: they send nothing, but end with their rank.
        with selectors.DefaultSelector() as selector:
            for rank, line in self.followers.items():
                selector.register(line.connection, selectors.EVENT_READ, rank)
            left = set(ranks)
            while left:
                for key, _ in selector.select():
                    reply = self.followers[key.data].read()
                    if reply is None:
                        raise _lost(key.data)
                    left.discard(key.data)
                    yield reply[0]


def _lost(rank: int) -> JobEndedError:
    return JobEndedError(
        f"rank {rank} of the job has ended, so the certificate cannot go on; its message gives the reason, or the"
        " system has killed it"
    )


def _follow(environment: LaunchEnvironment, line: _Line, turn: Turn) -> int:
    """Take part in the turns of rank 0; return the exit code."""
    while True:
        order = line.read()
        if order is None:
            raise _lost(0)
        if isinstance(order, int):
            return order
        number, processes, host, port = order
        values = None
        try:
            turn(number, _place(environment, processes, host, port))
        except KeyboardInterrupt:
            values = error_to_values(StoppedError("stopped by a signal"))
        except TrainerError as error:
            values = error_to_values(error)
        with suppress(OSError):  # rank 0 has ended, as the next line shows
            line.send([values])


def _place(environment: LaunchEnvironment, processes: int, host: str, port: int) -> LaunchEnvironment:
    """Return the place of this rank among the first ranks of its job."""
    first = environment.rank - environment.local_rank  # of this machine
    return replace(
        environment, world_size=processes, local_world_size=min(environment.local_world_size, processes - first),
        master_addr=host, master_port=port, has_agent_store=False,
    )  # fmt: skip


def in_job(
    environment: LaunchEnvironment, recipe: Recipe, asked: str, turn: Turn, lead: Callable[[Leader], int]
) -> int:
    """Meet the ranks of the job, and lead them as rank 0, or follow; return the exit code.

    Args:
        asked: the request, which all ranks must have in common.

    Raises:
        UsageError: the ranks were started with different commands, or may join and leave.
        TrainerError: ranks are missing, or one has ended.
    """
    if environment.elastic_nodes is not None:
        least, most = environment.elastic_nodes
        raise UsageError(
            f"`trainer certify` needs a fixed number of ranks, but torchrun was started with --nnodes {least}:{most};"
            " give one number"
        )
    with ExitStack() as stack:
        lines, host = _meet(environment, recipe.parallel.join_timeout.seconds, asked, stack)
        if environment.rank:
            return _follow(environment, lines[0], turn)
        leader = Leader(environment, host, lines, turn)
        code = int(ExitCode.FAILED)
        try:
            code = lead(leader)
            sys.stdout.flush()  # a launcher may kill this rank when the others leave
        except TrainerError as error:
            code = error.exit_code
            raise
        except KeyboardInterrupt:
            code = INTERRUPTED
            raise
        finally:
            leader.end(code)
        return code


def _meet(environment: LaunchEnvironment, seconds: float, asked: str, stack: ExitStack) -> tuple[dict[int, _Line], str]:
    """Return the connections of this rank, and the address of rank 0's machine; the store ends here."""
    # The store has threads, which a fork must not meet, and perhaps the port of the job.
    rendezvous = join_ranks(environment, seconds)
    if not rendezvous.all_same(asked, seconds):
        raise UsageError(
            "all ranks of a certificate must have the same recipe, options and source, but those of this job differ;"
            " start every rank with the same command and installation"
        )
    server, mine = None, None
    if environment.rank == 0:
        host = _host(environment)
        address = listening_address(host, one_machine=environment.num_nodes == 1)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        server = stack.enter_context(socket.create_server((address, 0), family=family, backlog=_BACKLOG))
        mine = [host, server.getsockname()[1], secrets.token_hex(16)]
    host, port, token = rendezvous.share(mine, seconds)
    lines = rendezvous.together(lambda: _connect(environment, server, host, port, token), _CONNECT_SECONDS)
    for line in lines.values():
        stack.callback(line.close)
    rendezvous.share(None, seconds)  # rank 0 waits here until the others have read the store
    return lines, host


def _host(environment: LaunchEnvironment) -> str:
    """Return the address of rank 0's machine, on that machine; torchrun's agent may serve the store on another one."""
    host = environment.master_addr
    if not environment.has_agent_store or environment.num_nodes == 1:
        return host
    with socket.create_connection((host, environment.master_port), _CONNECT_SECONDS) as connection:
        own = str(connection.getsockname()[0])
    return host if is_loopback(own) else own


def _connect(
    environment: LaunchEnvironment, server: socket.socket | None, host: str, port: int, token: str
) -> dict[int, _Line]:
    """Connect each rank with rank 0; return the connections of this rank by the rank at their end."""
    if server is None:
        line = _Line(socket.create_connection((host, port), _CONNECT_SECONDS))
        line.send([token, environment.rank])
        return {0: line}
    found: dict[int, _Line] = {}
    deadline = time.monotonic() + _CONNECT_SECONDS
    while len(found) < environment.world_size - 1:
        server.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            connection, _ = server.accept()
        except TimeoutError as error:
            missing = sorted(set(range(1, environment.world_size)) - found.keys())
            raise TrainerError(f"the ranks {missing} did not connect to rank 0 at {host}:{port}") from error
        line = _Line(connection)
        connection.settimeout(5.0)  # a stranger may connect, and send nothing
        greeting = line.read()
        connection.settimeout(None)
        if isinstance(greeting, list) and greeting[:1] == [token]:
            found[greeting[1]] = line
        else:
            line.close()
    return found


def _free_port(host: str) -> int:
    with socket.create_server((listening_address(host, one_machine=True), 0)) as server:
        return int(server.getsockname()[1])
