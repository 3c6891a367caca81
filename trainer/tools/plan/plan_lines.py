"""The plan of a recipe as lines of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.base.disk import replace_text
from trainer.base.errors import UsageError
from trainer.base.text import size
from trainer.checkpoint.memory_folder import KEPT
from trainer.models.configuration import load_config
from trainer.models.tensor_split import context_notes
from trainer.tools.plan.ledger import COMPONENTS
from trainer.tools.plan.recipe_plan import (
    HOST_RESERVED,
    Choice,
    RecipePlan,
    TrainingCost,
    as_object,
    bytes_by_link,
    traffic_by_axis,
    traffic_by_module,
)
from trainer.tools.plan.searching import MOST_SHOWN, SearchResult
from trainer.tools.plan.step_plan import StepPlan
from trainer.tools.report.timeline import as_svg, as_text


def plan_lines(made: RecipePlan, changes: Sequence[Choice] | None) -> Iterator[str]:
    """Yield the lines of a plan: layout, memory of each stage's ranks, communication, arithmetic and verdict.

    `changes` make it fit; None if none was tried.
    """
    plan = made.plan
    yield f"layout    {plan.layout}"
    if plan.layout.context:
        (split,) = context_notes(load_config(plan.recipe.model, {}), plan.layout.tp)
        yield f"attention {split}"
    yield f"batch     {plan.batch}, {made.length:,} tokens a text"
    yield f"strategy  {plan.strategy.name}: {plan.strategy.summary}"
    if plan.pipeline is not None:
        yield f"pipeline  {plan.pipeline}"
    for step in made.steps:
        yield ""
        several = plan.layout.pp > 1
        yield from rank_lines(
            made, step, f" of stage {step.stage} (rank {step.rank}; the other ranks are equal)" * several
        )
    yield ""
    loaded = max(step.loaded for step in made.steps)
    saved = made.export_bytes
    yield f"host      {size(loaded)} of weights on each rank at the start; {size(saved)} at most to export the model"
    if made.in_memory:
        copies = (
            ", with the copies of another host's shares" if made.plan.layout.world_size > made.devices.number else ""
        )
        yield f"          {size(made.in_memory)} on each host for {KEPT} checkpoints in memory{copies}"
    yield from _time(made)
    yield from _faster_types(made)
    yield from _verdict(made)
    if not made.fits and changes is not None:
        yield from _advice(changes)


def rank_lines(made: RecipePlan, step: StepPlan, where: str = "") -> Iterator[str]:
    """Yield the lines of one rank: memory, communication and arithmetic; `where` names the rank."""
    yield from _memory(step, where or " of a rank")
    yield from _communication(made, step)
    flops = ", ".join(
        f"{count / 1e12:,.3f} TFLOP in {str(kind).removeprefix('torch.')}" for kind, count in step.totals.flops.items()
    )
    yield f"  arithmetic     {flops or 'none'} of matrix products a step"


def _memory(step: StepPlan, where: str) -> Iterator[str]:
    when = "backward" if step.peak.place.backward else "forward"
    module = f" in the {when} pass of {step.peak.place.module}" if step.peak.place.module else ""
    yield f"memory{where}: {size(step.peak.num_bytes)} at its peak{module}"
    for component in COMPONENTS:
        if count := step.peak.by_component.get(component, 0):
            yield f"  {component:<24} {size(count):>12}"
    if step.host:
        yield f"  on the host, at its peak: {size(sum(step.host.values()))}"
        for component in COMPONENTS:
            if count := step.host.get(component, 0):
                yield f"    {component:<22} {size(count):>12}"


def _communication(made: RecipePlan, step: StepPlan) -> Iterator[str]:
    for (operation, axis), (calls, count) in sorted(traffic_by_axis(step).items()):
        modules = [module for module in traffic_by_module(step, operation, axis) if module]
        others = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
        source = f", from {modules[0]}{others}" if modules else ""
        yield f"  {operation} over {axis}: {calls:,} calls, {size(count)} a step{source}"
    links = bytes_by_link(made, step)
    if links["between"]:
        yield f"  inside of a machine {size(links['inside'])}, between machines {size(links['between'])} a step"


def _time(made: RecipePlan) -> Iterator[str]:
    time = made.time
    if time is None:
        yield f"The time of a step is unknown: {made.devices.name} names no device; --gpus 8xA100-80 does."
        return
    yield f"time of a step: {duration(time.likely)}, between {duration(time.least)} and {duration(time.most)}"
    for part, seconds in time.parts.items():
        if seconds > 0:
            yield f"  {part:<24} {duration(seconds):>12}  {seconds / time.likely:.0%}"
    rates = f"{time.samples_per_second:,.1f} samples/s, {time.tokens_per_second:,.0f} tokens/s"
    yield f"  {rates}, MFU {time.mfu:.1%}"
    if time.timeline is not None:
        for rank in range(len(time.timeline.ranks)):
            idle, alive = time.timeline.idle_share(rank), time.timeline.most_alive(rank)
            yield f"  pipeline rank {rank}: idle {idle:.0%}, activations of up to {alive} of its microbatches"


def _faster_types(made: RecipePlan) -> Iterator[str]:
    """Yield a line on types that the device multiplies faster than fp32, if the recipe computes in fp32."""
    machine, recipe = made.devices.machine, made.plan.recipe
    if machine is None or machine.is_cpu or recipe.precision != "fp32":
        return
    keys = {"bf16": "precision=bf16", "tf32": "tf32=true"}
    speeds = {key: machine.peak(name) / machine.peak("fp32") for name, key in keys.items()}
    faster = [f"{key} up to {speed:.0f} times" for key, speed in speeds.items() if speed > 1]
    if faster and not recipe.tf32:
        yield f"fp32: {machine.name} multiplies matrices faster with {' and '.join(faster)}"


def cost_lines(cost: TrainingCost | None) -> Iterator[str]:
    """Yield the line of the whole training, if its cost is known."""
    if cost is not None:
        price = "" if cost.price is None else f", price {cost.price:,.2f}"
        took = f"{duration(3600 * cost.hours)}, {cost.gpu_hours:,.2f} GPU-hours"
        yield f"training  {cost.steps:,} steps: {took}{price}"


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
    try:
        replace_text(file, as_svg(timeline))
    except OSError as error:
        raise UsageError(f"`--timeline` is {file}, which cannot be written: {error.strerror}") from error
    return f"wrote     {file}\n"


def _verdict(made: RecipePlan) -> Iterator[str]:
    memory, needed, host = made.devices.memory_bytes, made.needed, made.devices.host_bytes
    margin = f" ({size(made.reserved)} for CUDA and NCCL are included)" if made.reserved else ""
    if host is not None:
        included = f" ({size(HOST_RESERVED)} for the Python of each rank are included)"
        yield f"host memory of a machine: {_spare(made.host_needed, host)}{included}."
        if not made.fits_host:
            without = ", or checkpoint.memory=null" if made.in_memory else ""
            yield (
                "The host is too small; start fewer ranks on each machine, or load parts: parallel.strategy=zero3"
                f"{without}"
            )
        yield from _memory_folder(made, host)
    yield f"It {'fits' if needed <= memory else 'does not fit'}: {_spare(needed, memory)}{margin}."


def _memory_folder(made: RecipePlan, host: int) -> Iterator[str]:
    memory = made.plan.recipe.checkpoint.memory
    if memory is not None and made.in_memory > host // 2:
        yield (
            f"{memory.folder} needs {size(made.in_memory)} for checkpoints in memory, but by default it has half of the"
            f" host's memory, {size(host // 2)}; enlarge it (mount -o remount,size={made.in_memory}), or use more"
            " machines"
        )


def _spare(needed: int, memory: int) -> str:
    rest = f"{size(memory - needed)} to spare" if needed <= memory else f"{size(needed - memory)} too much"
    return f"{size(needed)} of {size(memory)}, {rest}"


def _advice(changes: Sequence[Choice]) -> Iterator[str]:
    if not changes:
        yield "No change of batch, precision, recomputation or strategy that was tried makes it fit; use more devices."
        return
    yield "These changes make it fit, in place of other values of these keys:"
    for change in changes:
        yield f"  {' '.join(change.overrides)}  ({size(change.made.needed)})"


def search_lines(found: SearchResult) -> Iterator[str]:
    """Yield the table of a search: the fastest layouts that fit, then a count of the others."""
    yield f"{'time of a step':>14}  {'range':>21}  {'samples/s':>9}  {'MFU':>5}  {'memory':>9}  overrides"
    for choice in found.choices[:MOST_SHOWN]:
        time = choice.made.time
        assert time is not None
        span = f"{duration(time.least)} to {duration(time.most)}"
        yield (
            f"{duration(time.likely):>14}  {span:>21}  {time.samples_per_second:>9,.1f}  {time.mfu:>5.1%}"
            f"  {size(choice.made.needed):>9}  {' '.join(choice.overrides)}"
        )
    if not found.choices:
        yield "no layout fits; use more devices"
    for reason, number in Counter(failure.problem for failure in found.failures).items():
        yield f"{number} layout{'s' * (number > 1)} left out: {reason}"
    if found.too_slow:
        yield f"{found.too_slow} layouts cannot be among the fastest: plans with the same cuts bound their time"
    if found.left_out:
        yield f"{found.left_out} layouts were not planned; --plans N allows more plans"


def search_as_object(found: SearchResult) -> Mapping[str, Any]:
    """Return the result of a search as JSON values."""
    return {
        "choices": [{"overrides": choice.overrides, **as_object(choice.made, [])} for choice in found.choices],
        "failures": [{"overrides": failure.overrides, "reason": failure.problem} for failure in found.failures],
        "left_out": found.left_out,
        "too_slow": found.too_slow,
    }


def duration(seconds: float) -> str:
    """Return seconds in hours, minutes, seconds or milliseconds."""
    for unit, length in (("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= length:
            return f"{seconds / length:,.2f} {unit}"
    return f"{1e3 * seconds:,.2f} ms"
