"""Processes that start with `trainer` imported, as forks of the fork server of `multiprocessing`."""

from __future__ import annotations

import multiprocessing
import os
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

from tests.helpers import processes


@cache
def forking() -> ForkServerContext:
    """Return the multiprocessing context of such processes. The fork server only imports.

    It starts with the environment of a user's shell, because libraries read it when they are imported.
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
