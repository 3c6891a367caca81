"""Profiles of some steps by torch's profiler: a trace of each rank, and the operations that take most time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch.profiler import ProfilerActivity, profile

from trainer.base.disk import remove, replace_text
from trainer.checkpoint.owner import require_no_link
from trainer.features.profiling.section import ProfileKeys
from trainer.observe.builders import ObserverParts
from trainer.observe.observer import Observer
from trainer.observe.records import RunInfo, SummaryRow
from trainer.observe.summary import TEXT_WIDTH

_MOST_OPERATIONS = 10
_MILLISECOND = 1e-3  # in the microseconds of the profiler


def observer(parts: ObserverParts) -> Profiler:
    """Return the profiler of a rank."""
    profile = cast(ProfileKeys, parts.recipe.logging).profile
    assert profile is not None
    first, last = profile.steps
    folder = Path(parts.recipe.checkpoint.folder) / "profile"
    return Profiler((first, last), parts.environment.rank, parts.environment.world_size, folder, parts.note)


class Profiler(Observer):
    """Observer of one rank that writes a trace for Perfetto; rank 0 also writes a table of operations.

    Args:
        steps: the first and the last step to profile, from 1.
    """

    def __init__(
        self, steps: tuple[int, int], rank: int, world_size: int, folder: Path, note: Callable[[str], None]
    ) -> None:
        self._first, self._last = steps
        self._rank = rank
        self._world_size = world_size
        self._folder = folder
        self._note = note
        self._running: Any = None
        self._result: SummaryRow | None = None

    def start(self, run: RunInfo) -> None:
        require_no_link(self._folder)

    def doing(self, step: int, what: str) -> None:
        # `step` counts the steps that are done, so step n runs after n - 1 of them.
        if self._running is None and self._result is None and self._first - 1 <= step < self._last:
            kinds = {ProfilerActivity.CPU} | ({ProfilerActivity.CUDA} if torch.cuda.is_available() else set())
            self._running = profile(activities=kinds)
            self._running.start()
        elif self._running is not None and step >= self._last:
            self._write(step)

    def finish(self, step: int) -> Sequence[SummaryRow]:
        """Write a profile that is still open at the end of the run; note if there is none."""
        if self._running is not None:
            self._write(step)
        elif self._result is None:
            self._note(f"`logging.profile.steps` is {self._first} to {self._last}, but none of these steps ran")
        return [self._result] if self._result is not None else []

    def close(self) -> None:
        if self._running is not None:
            self._running.stop()
            self._running = None

    def _write(self, step: int) -> None:
        """Write the trace and, on rank 0, the table; a full disk must not end the training."""
        running, self._running = self._running, None
        running.stop()
        steps = f"steps {self._first} to {min(step, self._last)}"
        traces = "1 trace" if self._world_size == 1 else f"{self._world_size} traces"
        table = _operation_lines(running)
        text = f"{steps}: {traces} for https://ui.perfetto.dev in {self._folder}"
        self._result = SummaryRow("profile", text, table)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            trace = self._folder / f"rank-{self._rank:05d}.json.gz"
            remove(trace)  # it may be a link
            running.export_chrome_trace(str(trace))
            if self._rank == 0:
                replace_text(self._folder / "operations.txt", "\n".join([*table, ""]))
        except OSError as error:
            self._note(f"the profile cannot be written to {self._folder} ({error.strerror})")


def _operation_lines(profiled: Any) -> list[str]:
    """Return a table of the operations with most time of their own: on the GPU, or without one on the CPU."""
    key = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    events = sorted(profiled.key_averages(), key=lambda event: -getattr(event, key))
    total = sum(getattr(event, key) for event in events) or 1
    table = [("own time", "share", "calls", "operation")]
    for event in events[:_MOST_OPERATIONS]:
        time = getattr(event, key)
        table.append((f"{time * _MILLISECOND:,.1f} ms", f"{time / total:.1%}", f"{event.count:,}", event.key))
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    cells = (("  ".join(f"{row[c]:>{widths[c]}}" for c in range(3)), row[3]) for row in table)
    return [f"{numbers}  {name}"[:TEXT_WIDTH] for numbers, name in cells]
