"""Processes that have imported `trainer` already: forks of one that multiprocessing keeps for us, its "forkserver"."""

from __future__ import annotations

import multiprocessing
import os
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

from tests.helpers import processes


@cache
def forking() -> ForkServerContext:
    """The context of such processes; the one to fork from imports and does no more.

    It starts in the environment of a user's shell, because libraries look at it when they are imported.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.faulty_run", "tests.helpers.training", "trainer.training.run"])
    ours, theirs = dict(os.environ), processes.environment()
    try:
        os.environ.clear()
        os.environ.update(theirs)
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(ours)
    return context
