"""Pools of gloo ranks that run a test's function and report the traceback of a failing rank.

A `RankPool` keeps its processes and their process group between calls, because importing torch takes seconds. Between
calls the processes are stopped: gloo has a thread for each group, which wakes 100 times a second. After a failure the
pool kills the processes, and the next call starts new ones. A test uses it like this:

    def sum_of_ranks(offset):
        total = torch.tensor(dist.get_rank() + offset)
        dist.all_reduce(total)
        return total.item()

    def test_sum(ranks):
        assert ranks(3).run(sum_of_ranks, 10) == [33, 33, 33]
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from tests.helpers.forking import forking, start_children_as_usual

START_SECONDS = 480.0  # imports and rendezvous, on a busy machine
MOST_CALLS = 100  # before a pool starts anew, because calls leave process groups with their threads
GRACE_SECONDS = 4.0  # for the other ranks to answer after one has failed

_IS_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1  # of prctl(2)


class RankError(AssertionError):
    """A rank raised, died or did not answer. The message contains its traceback."""


@dataclass(frozen=True)
class _Reply:
    """The reply of a rank: a pickled result, or the text of a traceback."""

    result: bytes | None
    failure: str | None = None
    died: bool = False


@dataclass(frozen=True)
class _Rank:
    process: BaseProcess
    connection: Connection

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the rank's process group: the rank and the processes that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.connection.close()


class RankPool:
    """`world_size` processes with one gloo process group, which run functions."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._ranks: list[_Rank] = []
        self._num_calls = 0

    def run(
        self, function: Callable[..., Any], /, *args: Any, timeout_seconds: float = 480.0, **kwargs: Any
    ) -> list[Any]:
        """Call `function(*args, **kwargs)` on every rank and return the results in rank order.

        Ranks find `function` by its module's file and its name: it must be at the top of a module, or a static method.
        Arguments and results are pickled. Each call starts with torch's seed 0 on every rank.

        Raises:
            RankError: A rank raised, died, or did not answer within `timeout_seconds`.
        """
        call = pickle.dumps((_address(function), pickle.dumps((args, kwargs))))
        self._num_calls += 1
        try:
            if self._num_calls > MOST_CALLS:
                self.close()
            if not self._ranks:
                self._start()
            for rank in self._ranks:
                rank.signal(signal.SIGCONT)
                rank.connection.send_bytes(call)
            replies = self._replies(timeout_seconds)
            if _IS_LINUX:  # elsewhere nothing would kill a stopped rank when its parent dies
                for rank in self._ranks:
                    rank.signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise
        return [pickle.loads(reply) for reply in replies]

    def close(self) -> None:
        """Kill the processes. A later `run` starts new ones."""
        for rank in self._ranks:
            rank.kill()
        self._ranks = []
        self._num_calls = 0

    def _start(self) -> None:
        context = forking()
        for index in range(self.world_size):
            ours, theirs = context.Pipe()
            # not a daemon: a daemon cannot have children, and data loaders start workers
            process = context.Process(target=_serve, args=(index, self.world_size, theirs), name=f"rank {index}")
            process.start()
            theirs.close()  # otherwise the connection would stay open after the rank's death
            self._ranks.append(_Rank(process, ours))
        first, *others = self._ranks
        if not first.connection.poll(START_SECONDS):
            raise RankError(f"rank 0 did not open its store in {START_SECONDS:.0f} s")
        port = first.connection.recv_bytes()
        for rank in others:
            rank.connection.send_bytes(port)
        self._replies(START_SECONDS)

    def _replies(self, timeout_seconds: float) -> list[bytes]:
        """Return one pickled result per rank, or raise the error of the first rank that failed."""
        deadline = time.monotonic() + timeout_seconds
        replies: dict[int, _Reply] = {}
        failed: int | None = None
        while waiting := {rank.connection: index for index, rank in enumerate(self._ranks) if index not in replies}:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                index = waiting[connection]
                replies[index] = self._receive(index)
                if replies[index].failure and failed is None:
                    failed = index
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if failed is None and waiting:
            raise RankError(self._hanging(sorted(waiting.values()), timeout_seconds))
        if failed is not None:
            # A dead rank is the cause, even if another rank reported the broken connection first.
            failed = next((index for index in sorted(replies) if replies[index].died), failed)
            raise RankError(self._failure(failed, replies))
        return [replies[index].result or b"" for index in range(self.world_size)]

    def _receive(self, index: int) -> _Reply:
        rank = self._ranks[index]
        try:
            reply: _Reply = pickle.loads(rank.connection.recv_bytes())
            return reply
        except (EOFError, OSError):
            rank.process.join(GRACE_SECONDS)
            code = rank.process.exitcode
            died = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
            return _Reply(None, f"the process died {died}", died=True)

    def _failure(self, failed: int, replies: dict[int, _Reply]) -> str:
        lines = [f"rank {failed} of {self.world_size} failed:", str(replies[failed].failure)]
        for index in range(self.world_size):
            if index not in replies:
                lines.append(f"rank {index} had not answered and was killed")
            elif index != failed and (failure := replies[index].failure):
                lines.append(f"rank {index} failed too: {failure.strip().splitlines()[-1]}")
        return "\n".join(lines)

    def _hanging(self, indices: list[int], timeout_seconds: float) -> str:
        for index in indices:  # the signal makes each rank write its stack to stderr
            with suppress(ProcessLookupError):
                os.kill(self._ranks[index].pid, signal.SIGUSR1)
        time.sleep(0.5)
        names = ", ".join(map(str, indices))
        return f"rank {names} of {self.world_size} did not answer in {timeout_seconds:g} s; the stacks are on stderr"


class RankPools:
    """One pool per world size, created on first use. The most recently used pools keep their processes.

    Args:
        most_ranks: Processes to keep in addition to those of the pool in use. Each worker of a test run has its own.
    """

    def __init__(self, most_ranks: int = 10) -> None:
        self._most_ranks = most_ranks
        self._pools: dict[int, RankPool] = {}  # in the order of use, most recent last

    def __call__(self, world_size: int) -> RankPool:
        pool = self._pools.pop(world_size, None) or RankPool(world_size)
        kept = 0
        for other in reversed(self._pools.values()):
            kept += other.world_size
            if kept > self._most_ranks:
                other.close()
        self._pools[world_size] = pool
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def _address(function: Callable[..., Any]) -> tuple[str, str, str]:
    """Return the module name, file and qualified name by which another process finds a function."""
    module = sys.modules[function.__module__]
    if "<" in function.__qualname__ or module.__file__ is None:
        raise TypeError(f"{function.__qualname__} must stand at the top of a module: ranks find it by its name")
    return module.__name__, module.__file__, function.__qualname__


def _find(address: tuple[str, str, str]) -> Any:
    """Return the function at an address. Load its module from the file, as pytest's importlib mode does."""
    name, file, qualname = address
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return reduce(getattr, qualname.split("."), sys.modules[name])


def _serve(rank: int, world_size: int, connection: Connection) -> None:
    """Join the process group, then answer calls until the parent closes the connection."""
    os.setsid()
    start_children_as_usual()
    parent = multiprocessing.parent_process()
    assert parent is not None
    if _IS_LINUX:  # a stopped process runs no thread, but the kernel can kill it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    faulthandler.register(signal.SIGUSR1)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    _join_group(rank, world_size, connection)
    connection.send_bytes(pickle.dumps(_Reply(pickle.dumps(None))))
    while True:
        try:
            call = connection.recv_bytes()
        except EOFError:
            os._exit(0)  # the interpreter's own exit would wait for gloo's threads
        gc.collect()
        gc.freeze()  # modules that earlier calls imported, which each pass of the collector would scan again
        connection.send_bytes(pickle.dumps(_answer(call)))


def _leave_with(parent: BaseProcess) -> None:
    """Exit when the parent exits, even if the main thread hangs in a collective."""
    parent.join()
    os._exit(1)


def _join_group(rank: int, world_size: int, connection: Connection) -> None:
    """Join the process group. The system chooses the store's port when rank 0 opens it, which excludes a race."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    _share_device()
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        connection.send_bytes(str(store.port).encode())
    else:
        store = dist.TCPStore("127.0.0.1", int(connection.recv_bytes()), world_size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def _share_device() -> None:
    """Let all gloo groups of this process use one device. Each device has a thread that wakes 100 times a second."""
    from torch.distributed import ProcessGroupGloo

    original, device = ProcessGroupGloo.__init__, ProcessGroupGloo.create_default_device()

    def init(self: ProcessGroupGloo, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = ProcessGroupGloo._Options()
        options._devices, options._timeout = [device], timeout
        original(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = init  # type: ignore[method-assign]


def _answer(call: bytes) -> _Reply:
    import torch

    try:
        torch.manual_seed(0)
        address, arguments = pickle.loads(call)
        function = _find(address)
        args, kwargs = pickle.loads(arguments)  # after the module is loaded: they may contain its classes
        return _Reply(pickle.dumps(function(*args, **kwargs)))
    except BaseException:  # including SystemExit and pytest's skip, which must reach the test
        return _Reply(None, traceback.format_exc())
