"""A finished run beside its plan: the factor by which its device is slower or faster than its rates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from trainer.base.errors import UsageError
from trainer.base.text import aligned, size
from trainer.recipe.reading.loading import load_values
from trainer.tools.plan.hardware import device_named, parse_devices
from trainer.tools.plan.rates import store_rate
from trainer.tools.plan.recipe_plan import plan_recipe
from trainer.tools.report.runs import read_run
from trainer.tools.utilisation import FIRST_STEP, PLANNED_FILE, mean_length
from trainer.tools.writing import write_over


@dataclass(frozen=True)
class PlannedRun:
    """The planned and the measured step of a run."""

    device: str
    ranks: int
    length: int | None  # the mean tokens of a text, for which the step was planned
    planned_seconds: float
    measured_seconds: float
    planned_bytes: int
    measured_bytes: int

    @property
    def factor(self) -> float:
        return self.measured_seconds / self.planned_seconds

    def rows(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield the cells of a table."""
        yield "", "planned", "measured", "ratio"
        planned, measured = (f"{1000 * one:,.1f} ms" for one in (self.planned_seconds, self.measured_seconds))
        yield "time of a step", planned, measured, f"{self.factor:.2f}"
        held = f"{self.measured_bytes / self.planned_bytes:.2f}"
        yield "peak memory", size(self.planned_bytes), size(self.measured_bytes), held


def planned_run(folder: Path) -> PlannedRun:
    """Plan the step of a run on its device, by the data sheet's rates, for the mean length of its rows.

    Raises:
        UsageError: the run has no steps after its warm-up, or its device has no rates.
        TrainerError: its recipe cannot be planned.
    """
    run = read_run(folder)
    written = str(run.info.get("device", ""))
    name, ranks = device_named(written), int(run.info.get("world_size", 1))
    if name is None:
        raise UsageError(
            f"{str(folder)!r} ran on {written!r}, which is no device with known rates; measure the machine by"
            " `trainer plan --measure FILE.json`"
        )
    first = FIRST_STEP + int(run.info.get("resumed_from") or 0)
    steps = [one for one in run.metrics.steps if one.step >= first]
    if not steps:
        raise UsageError(
            f"{str(folder)!r} must have logged steps from step {first} on, because earlier ones warm up, but it"
            f" ends at {run.last_step}; train it longer"
        )
    resolved = load_values(run.info.get("recipe") or {}, needs_data=False)
    length = mean_length(steps[-1], resolved.recipe)
    made = plan_recipe(resolved, parse_devices(f"{ranks}x{name}"), 1, length)
    assert made.time is not None
    # On a CPU, the measured bytes are those of the process, with Python and torch.
    planned = made.needed if made.devices.is_cpu else made.heaviest.peak.num_bytes
    return PlannedRun(
        name, ranks, length, made.time.likely, median(one.step_seconds for one in steps),
        planned, max(one.peak_memory_bytes for one in steps),
    )  # fmt: skip


def calibrate(folder: Path, file: Path) -> list[str]:
    """Write the factor of a run's device into a file of rates, and the plan into the run's folder; return lines.

    Raises:
        TrainerError: see `planned_run`; or a file cannot be written.
    """
    found = planned_run(folder)
    values = {**asdict(found), "factor": found.factor}
    write_over(folder / PLANNED_FILE, json.dumps(values, indent=2) + "\n", "--calibrate")
    store_rate(file, found.device, {"factor": found.factor, "run": str(folder), "ranks": found.ranks})
    return [
        *aligned(list(found.rows())),
        f"wrote     {file}: the next plans of {found.device} take {found.factor:.2f} times as long; --rates none leaves"
        " it out",
        f"wrote     {folder / PLANNED_FILE}, for `trainer report`",
    ]
