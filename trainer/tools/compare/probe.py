"""Two steps after the timed ones: one under torch's profiler, one under the planner's ledger of collectives.

Both slow a step down, so neither step is timed.
"""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from trainer.base.disk import read_plain, replace_text
from trainer.base.errors import UsageError
from trainer.observe.observer import Observer
from trainer.tools.plan.ledger import Ledger
from trainer.tools.step_profile import StepProfile

STEPS = 2
"""The steps that a probe needs."""

PARTS = ("compute", "communication", "rest")
"""The fields of `Shares` that add up to 1."""

_FILES = "probe-*.json"


@dataclass(frozen=True)
class Shares:
    """The parts of a step, which add up to 1, and the bytes of its collectives."""

    compute: float  # the share with a running operation or kernel
    communication: float  # the share in which a collective runs, or waits for another rank, and nothing is computed
    rest: float  # the share of neither: the host's own work, and waiting for rows
    sent_bytes: int  # one rank's input or output of each collective, whichever is larger, summed


_SHARES, _MOST_BYTES = TypeAdapter(Shares), 1 << 16


class Probe(Observer):
    """Observer of one rank that writes the `Shares` of a step.

    `first` is the number of steps before the probed ones.
    """

    def __init__(self, first: int, rank: int, folder: Path) -> None:
        self._begins, self._ends, self._rank, self._folder = first, first, rank, folder
        self._running = ExitStack()
        self._parts: tuple[float, float, float] | None = None

    def doing(self, step: int, what: str) -> None:
        # `doing` is called several times in a step; the first call of a step ends the probe of the one before.
        if step < self._ends or step > self._begins + STEPS:
            return
        self._running.close()
        self._ends = step + 1
        if step == self._begins:
            profiled = StepProfile()
            self._running.callback(lambda: self._take(profiled))
            self._running.enter_context(profiled)
        elif step == self._begins + 1:
            ledger = Ledger()
            self._running.callback(lambda: self._write(ledger))
            self._running.enter_context(ledger)

    def close(self) -> None:
        # Before the stack closes, which would write.
        self._parts = None  # a step that did not end is not written
        self._running.close()

    def _take(self, profiled: StepProfile) -> None:
        compute, communication, rest = profiled.seconds
        length = sum(profiled.seconds)
        self._parts = compute / length, communication / length, rest / length

    def _write(self, ledger: Ledger) -> None:
        if self._parts is not None:
            sent = sum(traffic.num_bytes for traffic in ledger.totals.traffic.values())
            text = json.dumps(asdict(Shares(*self._parts, sent)))
            replace_text(self._folder / _FILES.replace("*", str(self._rank)), text + "\n")


def read_shares(folder: Path) -> Shares | None:
    """Return the mean shares of all ranks and the bytes of the rank that sends most; None if nothing was probed.

    Raises:
        UsageError: a file is not one that a probe writes.
        OSError: a file cannot be read.
    """
    try:
        found = [_SHARES.validate_json(read_plain(file, _MOST_BYTES), strict=True) for file in folder.glob(_FILES)]
        if not all(0 <= value < math.inf for one in found for value in astuple(one)):
            raise ValueError("a share is a finite number")
    except ValueError as error:  # pydantic's errors too
        raise UsageError(f"{folder} must hold the times of a probe, but does not: {error}; remove it") from error
    if not found:
        return None
    mean = {name: sum(getattr(one, name) for one in found) / len(found) for name in PARTS}
    # The busiest rank decides the time of a collective.
    return Shares(**mean, sent_bytes=max(one.sent_bytes for one in found))
