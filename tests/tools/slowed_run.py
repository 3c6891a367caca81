"""`trainer` with one planted cause of lost time: `CAUSE run RECIPE ...`. It samples steps after a moment."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from trainer.cli import main as program
from trainer.data.loader import TrainLoader
from trainer.engine.native import NativeEngine
from trainer.models import compiled
from trainer.tools import sampling

SECONDS = 0.1  # lost in each step
_CLONE_NEWNET = 0x40000000
_RATE = ("rate", "4mbit", "burst", "16kb", "latency", "400ms")


def _slow_disk() -> None:
    """Read the rows of each step slowly."""
    iterate = TrainLoader.__iter__

    def slow(self: TrainLoader) -> Any:
        for batch in iterate(self):
            time.sleep(SECONDS)
            yield batch

    TrainLoader.__iter__ = slow  # type: ignore[method-assign]


def _slow_rank(engine: Any = NativeEngine) -> None:
    """Take each step slowly on rank 1."""
    begin_step = engine.begin_step

    def slow(self: Any, *args: Any) -> Any:
        time.sleep(SECONDS if os.environ.get("RANK") == "1" else 0)
        return begin_step(self, *args)

    engine.begin_step = slow


def _slow_rank_of_zero() -> None:
    from trainer.features.deepspeed.engine import ZeroEngine

    _slow_rank(ZeroEngine)


def _many_widths() -> None:
    """Compile for each width of a batch; the kernels of Inductor would take minutes."""
    compiled.BACKEND = "eager"


def shape_traffic() -> None:
    """Enter a network of its own, with a slow loopback.

    Raises:
        OSError, subprocess.CalledProcessError: the system does not allow it.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["ip", "link", "set", "lo", "mtu", "1500", "up"], check=True)
    subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", "tbf", *_RATE], check=True)


CAUSES = {
    "disk": _slow_disk,
    "rank": _slow_rank,
    "rank of zero": _slow_rank_of_zero,
    "link": shape_traffic,
    "widths": _many_widths,
    "none": lambda: None,
}


def main(words: Sequence[str]) -> int:
    """Run the program with the arguments after the cause."""
    cause, *argv = words
    CAUSES[cause]()
    sampling.SHORTEST_SECONDS, sampling.LEAST_STEPS = {"cpu": 0.0, "cuda": 0.0}, 4
    return program(argv)
