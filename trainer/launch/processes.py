"""Starts the ranks of one machine as processes of this one, and watches them until all have ended.

The watching process starts no thread. A fork copies every lock that another thread holds, and the forked rank then
waits for it forever; the C library's resolver has such a lock, and torch's store uses the resolver. One loop therefore
reads the ranks' output, sees their ends, and keeps the time limits.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TextIO

import psutil

from trainer.base.errors import INTERRUPTED, ExitCode
from trainer.base.terminal import guard, write
from trainer.ranks.environment import LaunchEnvironment, set_rank
from trainer.ranks.stopping import handled

GRACE_SECONDS = 60.0
"""Time for the ranks to finish their step and save, between the signal that asks them to stop and SIGKILL."""

_AFTER_FAILURE_SECONDS = 30.0  # for the other ranks to leave when one has failed
_POLL_SECONDS = 0.1
_CHUNK_BYTES = 65536
_LOOPBACK = "127.0.0.1"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

StartMethod = Literal["fork", "spawn"]
Life = Callable[[Any, LaunchEnvironment], int]


class Stop:
    """The first signal that asked the run to stop, and whether a second Ctrl-C followed."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.is_urgent = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Record the signal; the loop acts on it."""
        if self.signal is None:
            self.signal = signal.Signals(number)
        elif number == signal.SIGINT:
            self.is_urgent = True


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Record stop signals instead of ending this process; signals that it was started to ignore stay ignored."""
    stop = Stop()
    with handled([number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN], stop.handle):
        yield stop


@dataclass(frozen=True)
class Ended:
    """A rank that has ended.

    `exit_code` is negative where a signal ended it, as in `multiprocessing`.
    """

    rank: int
    pid: int
    exit_code: int

    @property
    def has_failed(self) -> bool:
        """Whether the rank left with an error; `DONE` and `STOPPED` are regular ends."""
        return self.exit_code not in (ExitCode.DONE, ExitCode.STOPPED)


@dataclass
class _Output:
    """One output stream of a rank, which is passed on line by line behind the number of the rank."""

    source: Connection
    target: TextIO
    prefix: str
    pending: bytes = b""

    def pass_on(self) -> bool:
        """Pass on the available bytes; returns False at the end of the stream."""
        chunk = os.read(self.source.fileno(), _CHUNK_BYTES)
        # The part after the last line break waits for its end, so that lines of ranks do not mix.
        *lines, self.pending = (self.pending + chunk).split(b"\n")
        if self.pending and (not chunk or len(self.pending) > _CHUNK_BYTES):
            lines, self.pending = [*lines, self.pending], b""
        if lines:
            with suppress(OSError):  # the terminal is gone; the ranks go on
                write("".join(f"{self.prefix}{line.decode(errors='replace')}\n" for line in lines), self.target)
        return bool(chunk)


@dataclass
class _Rank:
    number: int
    process: BaseProcess
    ended: Ended | None = field(default=None)

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def look(self) -> None:
        if self.ended is None and self.process.exitcode is not None:
            self.ended = Ended(self.number, self.pid, self.process.exitcode)

    def kill(self) -> None:
        """Kill the rank and the processes that it started; it leads its own process group."""
        with suppress(ProcessLookupError, PermissionError):
            # Data workers of the rank are in its group, and would keep memory and pipes.
            os.killpg(self.pid, signal.SIGKILL)
        self.process.kill()

    def is_suspended(self) -> bool:
        """Whether SIGSTOP holds the process, so that SIGTERM cannot reach it."""
        with suppress(psutil.Error):
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        return False


class LocalRanks:
    """The ranks of this machine, from their start to the end of the last one.

    Rank 0 keeps the terminal; every line of the others is shown with the rank in front. The ranks meet at a socket that
    listens on the loopback address alone.

    Args:
        life: function that each rank runs; it returns the exit code.
        argument: first argument of `life`, pickled where the start method is spawn.
        method: fork, or spawn where CUDA is in use.
        folder: existing folder for the error files of the ranks.
        place: the one rank to start, of a job in which other processes start the others; None: all ranks.
    """

    def __init__(
        self, life: Life, argument: Any, number: int, method: StartMethod, folder: Path, place: LaunchEnvironment | None
    ) -> None:
        self.was_killed = False
        self._context: Any = multiprocessing.get_context(method)
        self._selector = selectors.PollSelector()
        self._outputs: list[_Output] = []
        self._ranks: list[_Rank] = []
        self._ended: list[Ended] = []
        self._kill_at: float | None = None
        self._was_asked = False
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until the rank has its own handlers
        try:
            if place is not None:
                self._start(life, argument, replace(place, error_file=folder / "error.json"), None)
                return
            with socket.create_server((_LOOPBACK, 0)) as listener:
                environment = LaunchEnvironment(
                    "trainer",
                    world_size=number,
                    local_world_size=number,
                    master_addr=_LOOPBACK,
                    master_port=listener.getsockname()[1],
                )
                for rank in range(number):
                    of_rank = replace(environment, rank=rank, local_rank=rank, error_file=folder / f"error-{rank}.json")
                    # A fork inherits the socket anyway, and closes it. A spawned rank gets it only if it serves the
                    # store.
                    self._start(life, argument, of_rank, listener if rank == 0 or method == "fork" else None)
        except BaseException:
            self.kill()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def wait(self, stop: Stop) -> list[Ended]:
        """Watch the ranks until all have ended; returns the ends in their order.

        When one fails, the others get SIGTERM, and SIGKILL if they do not leave. `stop` is passed on as SIGTERM.
        """
        try:
            while len(self._ended) < len(self._ranks):
                self._pass_on(_POLL_SECONDS)
                self._look()
                self._obey(stop)
            self._pass_on(0)
        finally:
            self.kill()
            self._selector.close()
            for output in self._outputs:
                output.source.close()
        return self._ended

    def kill(self) -> None:
        """Kill the ranks that still run."""
        for rank in self._ranks:
            if rank.ended is None:
                rank.kill()
                rank.process.join()

    def _start(self, life: Life, argument: Any, environment: LaunchEnvironment, listener: socket.socket | None) -> None:
        number = environment.rank
        pipes = [self._context.Pipe(duplex=False) for _ in range(2 if number else 0)]
        for (source, _), target in zip(pipes, (sys.stdout, sys.stderr), strict=False):
            output = _Output(source, target, f"[rank {number}] ")
            self._outputs.append(output)
            self._selector.register(source.fileno(), selectors.EVENT_READ, output)
        # A fork inherits the reading ends of all pipes so far, and must close them.
        ours = [output.source for output in self._outputs] if self._context.get_start_method() == "fork" else []
        writers = tuple(writer for _, writer in pipes)
        process = self._context.Process(
            target=_become_rank, args=(life, argument, environment, os.getpid(), listener, writers, ours)
        )
        process.start()
        # With the writing end in the rank alone, the end of the rank is the end of the stream.
        for writer in writers:
            writer.close()
        self._ranks.append(_Rank(number, process))

    def _pass_on(self, timeout_seconds: float) -> None:
        """Show the available output: of one call of `select`, or all of it where the timeout is 0."""
        if not self._selector.get_map():
            time.sleep(timeout_seconds)
        while events := self._selector.select(timeout_seconds) if self._selector.get_map() else []:
            for key, _ in events:
                if not key.data.pass_on():
                    self._selector.unregister(key.fd)
            if timeout_seconds:
                return

    def _look(self) -> None:
        """Record the ranks that have ended since the last look."""
        before = {ended.rank for ended in self._ended}
        for rank in self._ranks:
            rank.look()
        # Several ranks may have ended between two looks, in an order that nobody has seen.
        new = [rank.ended for rank in self._ranks if rank.ended is not None and rank.number not in before]
        # A signal leaves no report, and ranks that leave with an error may do so because of it.
        self._ended += sorted(new, key=lambda ended: (ended.exit_code >= 0, ended.rank))

    def _obey(self, stop: Stop) -> None:
        running = [rank for rank in self._ranks if rank.ended is None]
        if stop.signal is not None and not self._was_asked:
            self._was_asked = True
            self._terminate(running, GRACE_SECONDS)
        if any(ended.has_failed for ended in self._ended) and self._kill_at is None:
            self._terminate(running, _AFTER_FAILURE_SECONDS)
        if running and (stop.is_urgent or (self._kill_at is not None and time.monotonic() >= self._kill_at)):
            self.was_killed |= self._was_asked
            self.kill()
        # SIGTERM waits until a suspended rank continues, so such a rank would hold up the end of all.
        elif self._ended:
            for rank in running:
                if rank.is_suspended():
                    rank.kill()

    def _terminate(self, running: list[_Rank], grace_seconds: float) -> None:
        """Send SIGTERM to each rank alone, not to its group: its data loaders still serve it."""
        self._kill_at = time.monotonic() + grace_seconds
        for rank in running:
            rank.process.terminate()


def _become_rank(
    life: Life,
    argument: Any,
    environment: LaunchEnvironment,
    parent: int,
    listener: socket.socket | None,
    outputs: tuple[Connection, ...],
    inherited: list[Connection],
) -> None:
    """Run `life` as a rank, in its process.

    Args:
        listener: socket for the store of rank 0; other ranks close it.
        outputs: pipes for standard output and standard error; empty for rank 0.
        inherited: the watching process's ends of the pipes, which a forked rank closes.
    """
    for connection in inherited:
        connection.close()
    if listener is not None and environment.rank == 0 and environment.world_size > 1:
        # `detach` leaves the descriptor open for torch's store, which takes it over.
        environment = replace(environment, listen_fd=listener.detach())
    elif listener is not None:
        listener.close()
    for descriptor, connection in enumerate(outputs, start=1):
        # Below Python's streams, so that output of libraries in C++ takes the same way.
        os.dup2(connection.fileno(), descriptor)
        connection.close()
    # A pipe is no terminal, so Python would hold lines back until its buffer is full.
    if outputs and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    os.setsid()  # Ctrl-C in the terminal reaches the watching process alone, which passes it on
    guard()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    # Signals that have come since the start of this process arrive here.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    threading.Thread(target=_leave_without, args=(parent, bool(outputs)), daemon=True).start()
    set_rank(environment)
    try:
        code = life(argument, environment)
    except KeyboardInterrupt:  # the watching process has died before the first step
        code = INTERRUPTED
    sys.exit(code)


def _leave_without(parent: int, has_pipes: bool) -> None:
    """Stop this rank when the watching process has died: save and leave as after Ctrl-C, and never stay behind."""
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    if has_pipes:  # without a reader, a line of output would end the rank before it has saved
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(GRACE_SECONDS)
    os._exit(ExitCode.FAILED)
