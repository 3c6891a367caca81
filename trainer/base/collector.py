"""Pauses of Python's garbage collector. This module imports no torch."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Import modules without passes of the collector. In a new process, keep the objects made so far out of later ones.

    The modules of torch and transformers stay until the process ends, so a pass over them frees nothing. A fork shares
    more memory, and no pass over them stops one rank in a step while the others wait. If transformers was imported
    before, there may be a model, and garbage with it: then nothing is kept.
    """
    was_enabled, is_new = gc.isenabled(), "transformers" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if is_new:
            gc.freeze()
        if was_enabled:
            gc.enable()


def end() -> None:
    """Free objects in cycles before the process ends, and spare the interpreter its passes over all modules."""
    gc.collect()
    gc.freeze()
