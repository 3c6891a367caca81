"""Plans and timelines of pipelines, by the templates in `texts/`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from trainer.base.errors import UsageError
from trainer.base.templates import templates
from trainer.base.text import listed, size
from trainer.models.configuration import load_config
from trainer.models.sequence_axis import axis_notes
from trainer.recipe.plan import RunPlan
from trainer.tools.plan.ledger import COMPONENTS
from trainer.tools.plan.machines import MachineResult, reasons_of
from trainer.tools.plan.recipe_plan import (
    HOST_RESERVED,
    RESERVED,
    Choice,
    RecipePlan,
    TrainingCost,
    bytes_by_link,
    plan_notes,
    traffic_by_axis,
    traffic_by_module,
)
from trainer.tools.plan.searching import MOST_SHOWN, SearchResult
from trainer.tools.plan.shapes import shaped
from trainer.tools.plan.simulated_step import planned_model
from trainer.tools.report.timeline import ACTION_COLOURS, ACTION_NAMES, as_text
from trainer.tools.writing import write_over

_MOST_FILES = 8  # on a line
_MOST_LINES = 15


def plan_text(
    made: RecipePlan, changes: Sequence[Choice] | None, cost: TrainingCost | None, found: Sequence[str], name: str,
    larger: Choice | None = None,
) -> str:  # fmt: skip
    """Return a plan: verdict, layout, memory of each stage's ranks, communication, arithmetic and time.

    `changes` make it fit; None if none was tried. `found` are the overrides of a search on the devices `name`. `larger`
    uses spare memory.
    """
    plan, attention = made.plan, None
    if plan.layout.cp > 1:
        (attention,) = axis_notes(load_config(shaped(plan).recipe.model, {}), plan.layout)
    changes = None if made.fits else changes
    values = {
        "notes": [*_notes(plan), *filter(None, (made.devices.rates_note,))],
        "attention": attention,
        "faster": _faster_types(made),
        "changes": changes,
    }
    return text_of("plan", made=made, cost=cost, found=found, name=name, larger=larger, **values)


def _notes(plan: RunPlan) -> list[str]:
    notes = plan_notes(plan.recipe)
    if plan.recipe.model.adapter is None:
        return notes
    described = planned_model(shaped(plan))
    model = described.on_meta()
    described.adapt(model)
    return [*notes, *described.adapter_notes(model)]


def _faster_types(made: RecipePlan) -> list[str]:
    """Return the types that the device multiplies faster than fp32, if the recipe computes in fp32."""
    machine, recipe = made.devices.machine, made.plan.recipe
    if machine is None or machine.is_cpu or recipe.precision != "fp32" or recipe.tf32:
        return []
    keys = {"bf16": "precision=bf16", "tf32": "tf32=true"}
    speeds = {key: machine.peak(name) / machine.peak("fp32") for name, key in keys.items()}
    return [f"{key} up to {speed:.0f} times" for key, speed in speeds.items() if speed > 1]


def search_text(result: SearchResult, name: str) -> str:
    """Return the table of a search: the fastest layouts that fit, then a count of the others."""
    reasons = Counter(failure.problem for failure in result.failures)
    return text_of("search", result=result, name=name, reasons=reasons)


def machines_text(result: MachineResult, everything: bool, spot: float | None) -> str:
    """Return the table of machines: at most 15 lines, or all choices."""
    reasons = reasons_of(result, 10 if everything else 1)
    # Beside the choices, there are the best one, a header, at most one line for each of these, and three at the end.
    others = 6 + len(reasons) + len(result.notes) + (spot is not None)
    shown = result.choices if everything else result.choices[: max(1, min(result.num_best, _MOST_LINES - others))]
    return text_of("machines", result=result, shown=shown, reasons=reasons, spot=spot)


def text_of(template: str, **values: Any) -> str:
    """Return a text by its template."""
    return _environment().get_template(f"{template}.jinja").render(values).rstrip("\n")


@cache
def _environment() -> jinja2.Environment:
    environment = templates(Path(__file__).parent / "texts")
    environment.filters |= {
        "as": format, "size": size, "duration": duration, "hours": _hours, "listed": listed,
        "money": _money, "with_sizes": _with_sizes
    }  # fmt: skip
    environment.globals |= {
        "ACTION_COLOURS": ACTION_COLOURS, "ACTION_NAMES": ACTION_NAMES, "COMPONENTS": COMPONENTS,
        "HOST_RESERVED": HOST_RESERVED, "MOST_SHOWN": MOST_SHOWN, "RESERVED": RESERVED, "bytes_by_link": bytes_by_link,
        "spare": spare, "traffic_by_axis": traffic_by_axis, "traffic_by_module": traffic_by_module,
    }  # fmt: skip
    return environment


def _hours(hours: float) -> str:
    return duration(3600 * hours)


def _money(price: float) -> str:
    """Return a price with two digits behind the point, or two digits that are not zero."""
    return f"{price:,.2f}" if price >= 0.1 else f"{price:.2g}"


def _with_sizes(files: Mapping[str, int]) -> str:
    return listed([f"{name} ({size(count)})" for name, count in files.items()], _MOST_FILES)


def spare(needed: int, memory: int) -> str:
    """Return the bytes that are needed of a memory, and those to spare or too much."""
    rest = f"{size(memory - needed)} to spare" if needed <= memory else f"{size(needed - memory)} too much"
    return f"{size(needed)} of {size(memory)}, {rest}"


def draw_timeline(made: RecipePlan, file: Path) -> str:
    """Write the pipeline's timeline to an SVG file, and return a note; return the timeline as text if it is `-`.

    Raises:
        UsageError: there is no timeline, or the file cannot be written.
    """
    if made.time is None or made.time.timeline is None:
        fix = "name the GPUs, as in --gpus 8xA100-80" if made.time is None else "set parallel.pipeline.stages"
        raise UsageError(f"`--timeline` is {file}, but the plan has no pipeline with times; {fix}")
    timeline = made.time.timeline
    if str(file) == "-":
        return "\n".join(["", "one pass through the pipeline (F forward, b backward):", *as_text(timeline), ""])
    write_over(file, text_of("timeline", timeline=timeline) + "\n", "--timeline")
    return f"wrote     {file}\n"


def duration(seconds: float) -> str:
    """Return seconds in hours, minutes, seconds or milliseconds."""
    for unit, length in (("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= length:
            return f"{seconds / length:,.2f} {unit}"
    return f"{1e3 * seconds:,.2f} ms"
