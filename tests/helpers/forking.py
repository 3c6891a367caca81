"""Processes that start with `trainer` imported, as forks of the fork server of `multiprocessing`."""

from __future__ import annotations

import multiprocessing
import os
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkProcess, ForkServerContext
from multiprocessing.process import BaseProcess

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


def forked_children() -> list[BaseProcess]:
    """Return the living children that this process forked itself; ranks of pools come from the fork server."""
    return [child for child in multiprocessing.active_children() if isinstance(child, ForkProcess)]
