"""Waiting for a condition, with a limit of time."""

from __future__ import annotations

import time
from collections.abc import Callable

_LONGEST_PAUSE_SECONDS = 0.25  # between two questions, such as to the store of ranks


def wait_until(condition: Callable[[], bool], until: float) -> bool:
    """Poll a condition until that time of the monotonic clock; returns whether it held.

    torch's own wait takes twice its timeout and logs a warning.
    """
    pause = 0.002
    while not condition():
        if time.monotonic() >= until:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    return True
