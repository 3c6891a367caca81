"""Processes that start with `trainer` imported, as forks of the fork server of `multiprocessing`.

All workers of a test run share one server, because its imports take ten seconds of processor time.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from functools import cache
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkProcess, ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

from tests.helpers import processes


@cache
def forking(also: tuple[str, ...] = ()) -> ForkServerContext:
    """Return the multiprocessing context of such processes. The fork server only imports, in its first call `also` too.

    It starts with the environment of a user's shell, because libraries read it when they are imported.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.preloaded", *also])
    ours, theirs = dict(os.environ), processes.environment()
    try:
        os.environ.clear()
        os.environ.update(theirs)
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(ours)
    return context


def address() -> str | None:
    """Start the fork server, and return its address for `join`; None if this Python protects it by a key."""
    if sys.version_info >= (3, 14):
        return None
    forking()
    found: str = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
    return found


def join(address: str | None) -> None:
    """Fork from the server of another process; with None, a server of this process starts as usual."""
    if address is not None:
        server: Any = forkserver._forkserver  # type: ignore[attr-defined]
        server._forkserver_address = address
        server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # the other process keeps the server alive
        server.ensure_running = forkserver.ensure_running = resource_tracker.ensure_running


def start_children_as_usual() -> None:
    """Let this fork start processes by the default method. By the server's method, each would import torch again."""
    multiprocessing.set_start_method(None, force=True)


def forked_children() -> list[BaseProcess]:
    """Return the living children that this process forked itself; ranks of pools come from the fork server."""
    return [child for child in multiprocessing.active_children() if isinstance(child, ForkProcess)]
