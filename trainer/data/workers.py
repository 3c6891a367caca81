"""Ordered results of a function that several forked processes compute."""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from trainer.base.errors import TrainerError
from trainer.base.processes import ending
from trainer.ranks.environment import variables_set
from trainer.ranks.stopping import STOP_SIGNALS

Item = TypeVar("Item")
Result = TypeVar("Result")


def ordered_results(
    function: Callable[[Item], Result], items: Sequence[Item], num_processes: int, key: str
) -> Iterator[Result]:
    """Yield `function(item)` for each item, in order.

    Each process waits with a finished result until it is taken, so memory does not grow with the number of items. All
    processes end with the iterator or with this process.

    Args:
        function: the function; its results can be pickled.
        num_processes: the number of processes; 1: this process computes all results.

    Raises:
        TrainerError: a process died.
    """
    num_processes = min(num_processes, len(items))
    if num_processes <= 1:
        yield from map(function, items)
        return
    # A fork shares rows and function as they are; a closure could not be pickled.
    context = multiprocessing.get_context("fork")
    connections: list[Connection] = []
    workers: list[multiprocessing.process.BaseProcess] = []
    try:
        with stop_signals_held(), one_thread_of_tokenizers():
            for place in range(num_processes):
                here, there = context.Pipe(duplex=False)
                connections.append(here)
                # Every `num_processes`-th item, because the results are taken from the processes in turn.
                arguments = (function, items[place::num_processes], here, there)
                workers.append(context.Process(target=_work, args=arguments, daemon=True))
                workers[-1].start()
                there.close()  # so that a dead worker is the end of its pipe
        for index in range(len(items)):
            worker = workers[index % num_processes]
            try:
                result, error, trace = connections[index % num_processes].recv()
            except EOFError:
                worker.join()
                raise TrainerError(
                    f"a process of `{key}` ({num_processes}) died: {ending(worker.exitcode or 0)}; SIGKILL often means"
                    " that memory ran out: use fewer processes"
                ) from None
            if isinstance(error, TrainerError):
                raise error
            if error is not None:
                raise error from RuntimeError(f"in a process of `{key}`:\n{trace}")
            yield result
    finally:
        for worker in workers:
            # By SIGKILL, because workers ignore SIGTERM.
            worker.kill()
            worker.join()
        for connection in connections:
            connection.close()


def _work(function: Callable[[Any], Any], items: Sequence[Any], there: Connection, connection: Connection) -> None:
    there.close()  # so that the death of the parent breaks the pipe
    ignore_stop_signals()
    try:
        for item in items:
            try:
                answer: tuple[Any, Exception | None, str] = (function(item), None, "")
            except Exception as error:  # the parent raises it
                answer = (None, error, traceback.format_exc())
            connection.send(answer)
    except BrokenPipeError:
        pass  # the parent died


def one_thread_of_tokenizers() -> AbstractContextManager[None]:
    """Let the processes that start in this context tokenise in one thread each."""
    return variables_set({"TOKENIZERS_PARALLELISM": "false"})


@contextmanager
def stop_signals_held() -> Iterator[None]:
    """Block the stop signals in this thread and in the processes that it starts inside this context."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def ignore_stop_signals() -> None:
    """Ignore stop signals in a worker: the process that started it needs it until it ends by itself."""
    for stop_signal in STOP_SIGNALS:
        signal.signal(stop_signal, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
