"""A finished run beside its plan: the factor by which its device is slower or faster than its rates."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median

from trainer.base.errors import UsageError
from trainer.base.text import aligned
from trainer.recipe.reading.loading import load_values
from trainer.tools.plan.hardware import device_named, parse_devices
from trainer.tools.plan.rates import store_rate
from trainer.tools.plan.reachable import is_here
from trainer.tools.plan.recipe_plan import plan_recipe
from trainer.tools.plan.shapes import known_shapes
from trainer.tools.report.runs import read_run
from trainer.tools.utilisation import FIRST_STEP, PLANNED_FILE, PlannedRun, mean_length
from trainer.tools.writing import write_over


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


def planned_runs(folders: Iterable[Path]) -> dict[Path, PlannedRun]:
    """Return the planned steps of runs, without those that cannot be planned here, or only after a download."""
    found = {}
    for folder in folders:
        with suppress(Exception):  # a plan only completes a report
            recipe = load_values(read_run(folder).info.get("recipe") or {}, needs_data=False).recipe
            name = recipe.model.name_or_path
            if name is None or name in known_shapes() or is_here(name, recipe.model.revision):
                found[folder] = planned_run(folder)
    return found


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
