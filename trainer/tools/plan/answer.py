"""The answer to a request of `trainer plan`: plans of the recipe's layout or of those that a search finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainer.base.errors import UsageError
from trainer.observe.summary import format_bytes
from trainer.recipe.reading.loading import Chain, ResolvedRecipe
from trainer.tools.plan.hardware import Devices
from trainer.tools.plan.plan_text import plan_text, search_text
from trainer.tools.plan.recipe_plan import (
    RecipePlan,
    as_object,
    changes_that_fit,
    checked_plan,
    cost_of,
    larger_microbatch,
)
from trainer.tools.plan.request import PlanRequest
from trainer.tools.plan.searching import LayoutSearch, fewest_devices, write_extending


@dataclass(frozen=True)
class Answer:
    """The answer as text and as JSON values, and the plan of its one layout; None for a search."""

    text: str
    values: Mapping[str, Any]
    made: RecipePlan | None = None


def answer(request: PlanRequest, resolved: ResolvedRecipe) -> Answer:
    """Make the plans of a request, and write the recipe that it asks for.

    Raises:
        TrainerError: the recipe cannot be planned, nothing fits, or the recipe cannot be written.
    """
    devices, nodes, words = request.devices, request.nodes, request.overrides
    length = None if request.largest == "length" else request.length
    if request.search:
        search = LayoutSearch(request.recipe, words, devices, nodes, length, request.most_plans, request.any_precision)
        result = search.fastest()
        if result.choices:
            # The first choice is the fastest.
            _write(request, result.choices[0].overrides)
        values = {
            "choices": [{"overrides": choice.overrides, **as_object(choice.made, [])} for choice in result.choices],
            "failures": [{"overrides": failure.overrides, "reason": failure.problem} for failure in result.failures],
            "left_out": result.left_out,
            "too_slow": result.too_slow,
        }
        return Answer(search_text(result, _name(nodes, devices)), values)
    found: tuple[str, ...] = ()
    if request.is_auto:
        devices, nodes, choice = fewest_devices(request.recipe, words, devices, length)
        found, made = choice.overrides, choice.made
    elif request.largest is not None:
        search = LayoutSearch(request.recipe, words, devices, nodes, length)
        sizes = {"batch": search.largest_batch, "length": search.largest_length, "model": search.largest_model}
        fitting = sizes[request.largest]()
        if fitting is None:
            raise UsageError(f"no {request.largest} fits on {_name(nodes, devices)}; plan without --largest")
        found, made = fitting.overrides, fitting.made
    else:
        made = checked_plan(resolved, devices, nodes, length)
    _write(request, found)
    changes = larger = None
    if made.fits and request.most_changes and not found:
        larger = larger_microbatch(request.recipe, words, made, nodes)
    if not made.fits and request.most_changes:
        changes = changes_that_fit(request.recipe, words, made, nodes, request.most_changes)
    cost = cost_of(made, request.rows, request.price)
    values = {**as_object(made, changes or []), "overrides": found, "training": cost and asdict(cost)}
    if larger is not None:
        values["spare"] = {"overrides": larger.overrides, "needed_bytes": larger.made.needed}
    return Answer(plan_text(made, changes, cost, found, _name(nodes, devices), larger), values, made)


def answer_chain(request: PlanRequest, chain: Chain) -> Answer:
    """Plan each training of a recipe, and their hours, GPU-hours and price together.

    Raises:
        UsageError: the request is one of a single training.
        TrainerError: see `answer`.
    """
    options = {
        "--search": request.search, "--gpus auto": request.is_auto, "--largest": request.largest,
        "--timeline": request.timeline, "--write": request.write,
    }  # fmt: skip
    for option, value in options.items():
        if value:
            first = next(iter(chain.stages))
            raise UsageError(f"`{option}` takes one training, but the recipe has several; choose one: stage={first}")
    answers = {
        name: answer(replace(request, given=(*request.given, f"stage={name}")), resolved)
        for name, resolved in chain.stages.items()
    }
    if not answers:
        raise UsageError("`plan` takes a training, but the stage is a work beside them; choose another one")
    total, last = _total({name: one.values["training"] for name, one in answers.items()}, request.price is not None)
    most = max(answers, key=lambda name: answers[name].values["needed_bytes"])
    needed = format_bytes(answers[most].values["needed_bytes"])
    texts = [f"stage     {name}: {work}; it is not planned\n" for name, work in chain.works.items()]
    texts += [f"stage     {name}\n{one.text.rstrip()}\n" for name, one in answers.items()]
    values = {
        "stages": {name: one.values for name, one in answers.items()}, "works": dict(chain.works), "training": total
    }  # fmt: skip
    return Answer("\n".join([*texts, f"all       {last}", f"memory    {needed} at most, in {most}"]), values)


def _total(costs: Mapping[str, Mapping[str, float] | None], has_price: bool) -> tuple[dict[str, float] | None, str]:
    """Return the sum over trainings, None if one is unknown, and a line on it."""
    known = [cost for cost in costs.values() if cost is not None]
    if len(known) < len(costs):
        unknown = ", ".join(name for name, cost in costs.items() if cost is None)
        return None, f"the hours of {unknown} are unknown; add --rows N or training.max_steps=N, and name the GPUs"
    keys = ("steps", "hours", "gpu_hours", *(["price"] if has_price else []))
    total = {key: sum(cost[key] or 0.0 for cost in known) for key in keys}
    line = f"{total['steps']:,} steps, {total['hours']:,.2f} hours, {total['gpu_hours']:,.2f} GPU-hours"
    return total, line + (f", {total['price']:,.2f} for them" if has_price else "")


def _name(nodes: int, devices: Devices) -> str:
    return f"{nodes} x {devices.number} {devices.name}"


def _write(request: PlanRequest, found: Sequence[str]) -> None:
    if request.write is not None:
        write_extending(request.write, request.recipe, (*request.overrides, *found))
