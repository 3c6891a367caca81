"""The plan of a recipe on given devices: does it fit, and which changes make it fit."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from trainer.base.errors import TrainerError, UsageError
from trainer.checkpoint.registered import kept_in_memory
from trainer.models.weight_files import LARGEST_FILE_BYTES
from trainer.recipe.plan import BatchPlan, RunPlan, batch_sizes, plan_run
from trainer.recipe.reading.loading import ResolvedRecipe, load_recipe
from trainer.recipe.schema import Recipe
from trainer.tools.plan.hardware import Devices
from trainer.tools.plan.ledger import Traffic
from trainer.tools.plan.pipeline_plan import plan_steps
from trainer.tools.plan.shapes import shape_notes, shaped
from trainer.tools.plan.simulated_step import FP32_BYTES
from trainer.tools.plan.step_plan import StepPlan
from trainer.tools.plan.timing import StepTime, link_of, step_time
from trainer.tools.plan.work import plus
from trainer.training.checking import require_described

RESERVED = 2**30
"""Bytes of a GPU that tensors cannot have: the context of CUDA, its kernels, NCCL. An allowance, not a measurement."""

HOST_RESERVED = 2 * 2**30
"""Bytes of the host that each rank needs beside tensors: Python, PyTorch, data. An allowance, not a measurement."""


@dataclass(frozen=True)
class RecipePlan:
    """The plan of a recipe."""

    plan: RunPlan  # the recipe and its layout
    devices: Devices  # the devices of each machine
    length: int  # the tokens of each text
    steps: tuple[StepPlan, ...]  # the plan of one rank of each pipeline stage; the other ranks are like one of them

    @property
    def heaviest(self) -> StepPlan:
        """The plan of the rank that needs the most memory."""
        return max(self.steps, key=lambda step: step.peak.num_bytes)

    @property
    def num_parameters(self) -> int:
        """The number of parameters of the exported model."""
        return sum(step.saved for step in self.steps) // FP32_BYTES

    @property
    def needed(self) -> int:
        """The bytes that the device of the heaviest rank needs; on CPUs, a rank's part of the bytes of its host."""
        if self.devices.is_cpu:
            return -(-self.host_needed // self.devices.number)
        return self.heaviest.peak.num_bytes + RESERVED

    @cached_property
    def host_needed(self) -> int:
        """The bytes that the host of the fullest machine needs: at the start, in a step, or to export the model.

        At the start, each rank builds its weights; in a step, it holds its offloaded state, on a CPU all that is alive.
        To export the model, a rank collects the weights of one file. A rank copies its share of a checkpoint before it
        writes it to the disk, and another time before it writes it to memory. Checkpoints in memory stay there.
        """
        copies = 2 if self.num_in_memory else 1
        most = 0
        for index, own in enumerate(self._hosts):
            offloaded = sum(sum(step.host.values()) for step in own) + self._kept(index)
            alive = sum(step.peak.num_bytes for step in own) if self.devices.is_cpu else 0
            between = sum(sum(step.resident.values()) for step in own) if self.devices.is_cpu else 0
            # Each rank collects one file at a time, and all files together are no larger than the model.
            exported = min(sum(step.saved for step in self.steps), len(own) * LARGEST_FILE_BYTES)
            # An export and a checkpoint follow each other, so the larger one counts.
            saving = between + max(exported, copies * sum(step.share for step in own))
            loading = sum(step.loaded for step in own)
            most = max(most, max(offloaded + max(alive, saving), loading) + HOST_RESERVED * len(own))
        return most

    @cached_property
    def num_in_memory(self) -> int:
        """The number of checkpoints that stay in the memory of each host."""
        return kept_in_memory(self.plan.recipe)

    @cached_property
    def in_memory(self) -> int:
        """The bytes of checkpoints in memory on the fullest machine, with copies of another machine's shares."""
        return max(map(self._kept, range(len(self._hosts))))

    @cached_property
    def _hosts(self) -> list[list[StepPlan]]:
        layout, local = self.plan.layout, self.devices.number
        # Pipeline ranks are outermost, so consecutive ranks share a stage.
        ranks = [self.steps[rank * layout.pp // layout.world_size] for rank in range(layout.world_size)]
        return [ranks[first : first + local] for first in range(0, len(ranks), local)]

    def _kept(self, host: int) -> int:
        before = self._hosts[host - 1] if len(self._hosts) > 1 else []  # each machine keeps copies of the one before
        return self.num_in_memory * sum(step.share for step in (*self._hosts[host], *before))

    @property
    def export_bytes(self) -> int:
        """Bytes of weights that a rank collects on its host for one file of the exported model, at most."""
        return min(sum(step.saved for step in self.steps), LARGEST_FILE_BYTES)

    @cached_property
    def time(self) -> StepTime | None:
        """The time of a step; None if the devices have a memory but no speed."""
        machine = self.devices.machine
        if machine is None:
            return None
        return step_time(self.plan, self.steps, machine, self.length).times(self.devices.factor)

    @property
    def fits(self) -> bool:
        """Whether it fits the devices and, if its memory is known, the host."""
        return self.fits_devices and self.fits_host

    @property
    def fits_devices(self) -> bool:
        return self.needed <= self.devices.memory_bytes

    @property
    def fits_host(self) -> bool:
        return self.devices.host_bytes is None or self.host_needed <= self.devices.host_bytes


@dataclass(frozen=True)
class Choice:
    """Overrides of a recipe, and its plan with them."""

    overrides: tuple[str, ...]
    made: RecipePlan

    @property
    def seconds(self) -> float:
        """The likely seconds of a step."""
        assert self.made.time is not None
        return self.made.time.likely


def plan_recipe(resolved: ResolvedRecipe, devices: Devices, nodes: int = 1, length: int | None = None) -> RecipePlan:
    """Plan one training step of a recipe.

    Texts have `length` tokens; None: `data.max_length`.

    Raises:
        TrainerError: the recipe cannot be laid out over the devices, or its step cannot be planned.
    """
    plan = plan_run(resolved.recipe, devices.number * nodes, devices.number)
    tokens = length or tokens_of(resolved.recipe)
    fused = devices.machine is None or devices.machine.runs_kernels
    if (reason := refusal(devices, plan)) is not None:
        raise UsageError(reason)
    steps = plan_steps(shaped(plan), tokens, not devices.is_cpu, fused)
    if (reason := refusal(devices, plan, steps)) is not None:
        raise UsageError(reason)
    return RecipePlan(plan, devices, tokens, steps)


def refusal(devices: Devices, plan: RunPlan, steps: Iterable[StepPlan] = ()) -> str | None:
    """Return the reason why devices cannot compute the steps of a plan; None if they can."""
    machine, recipe = devices.machine, plan.recipe
    if machine is None or devices.is_cpu:
        return None
    known = machine.figures["teraflops"]
    if recipe.precision not in known:
        others = " or ".join(sorted({"bf16", "fp16", "fp32"}.intersection(known)))
        return f"`precision` is {recipe.precision}, which {machine.name} does not compute in; use {others}"
    in_fp8 = any(kind.dtype == torch.float8_e4m3fn for step in steps for kind in step.totals.work)
    if in_fp8 and "fp8" not in known:
        return f"the recipe asks for products in fp8, which {machine.name} does not compute; use another GPU"
    return None


def checked_plan(resolved: ResolvedRecipe, devices: Devices, nodes: int = 1, length: int | None = None) -> RecipePlan:
    """Check the packages and the models of a recipe as `trainer check` does, and plan it; see `plan_recipe`."""
    require_described(shaped(plan_run(resolved.recipe, devices.number * nodes, devices.number)))
    return plan_recipe(resolved, devices, nodes, length)


def tokens_of(recipe: Recipe) -> int:
    """Return the most tokens of a text; 1 for images."""
    tokens: int = getattr(recipe.data, "max_length", None) or 1
    return tokens


def changes_that_fit(
    recipe: str, overrides: tuple[str, ...], made: RecipePlan, nodes: int, most: int = 3
) -> list[Choice]:
    """Return changes with which the recipe fits, the cheapest ones first; each of them was planned.

    A change replaces the user's override of the same key.
    """
    found: list[Choice] = []
    for change in candidates(made.plan) if most else ():
        changed = {word.partition("=")[0] for word in change}
        # The change must win over the override of the same key.
        kept = [word for word in overrides if word.partition("=")[0] not in changed]
        try:
            changed_recipe = load_recipe(recipe, [*kept, *change], needs_data=False)
            other = plan_recipe(changed_recipe, made.devices, nodes, made.length)
        except TrainerError:
            continue  # this recipe cannot be changed like this
        if other.fits:
            found.append(Choice(change, other))
        # The candidates come cheapest first, so the first ones that fit are the answer.
        if len(found) == most:
            break
    return found


def larger_microbatch(recipe: str, overrides: tuple[str, ...], made: RecipePlan, nodes: int) -> Choice | None:
    """Return a layout with a larger microbatch that fits the spare memory, by one more plan; None without any."""
    batch, key = made.plan.batch, "training.micro_batch_size"
    given = any(word.partition("=")[0] == key for word in overrides)
    if given or made.plan.layout.pp > 1 or batch.num_microbatches < 2 or batch.micro_batch_tokens is not None:
        return None
    step = made.heaviest
    of_rows = max(1, step.peak.num_bytes - sum(step.resident.values()))  # they grow with the rows of a microbatch
    most = batch.micro_batch_size * (1 + (made.devices.memory_bytes - made.needed) / of_rows)
    rows = batch.rank_batch_size
    size = max(size for size in (rows, *halves(rows)) if size <= max(1, most))
    if size <= batch.micro_batch_size:
        return None
    change = (f"{key}={size}",)
    try:
        changed = load_recipe(recipe, [*overrides, *change], needs_data=False)
        other = plan_recipe(changed, made.devices, nodes, made.length)
    except TrainerError:
        return None
    return Choice(change, other) if other.fits else None


def candidates(plan: RunPlan) -> Iterator[tuple[str, ...]]:
    """Yield overrides that save memory, those first that cost the least time."""
    recipe, smaller = plan.recipe, list(_smaller_microbatches(plan.batch))
    fsdp = ["parallel.strategy=fsdp"] * (plan.layout.data_parallel_size > 1 and not plan.strategy.cuts_anything)
    levels = ("none", "selective", "full")
    more = levels[levels.index(recipe.activation_checkpointing) + 1 :]
    recomputed = [f"activation_checkpointing={level}" for level in more]
    bf16 = ["precision=bf16"] * (recipe.precision == "fp32")
    for word in (*bf16, *smaller[:2], *recomputed, *fsdp):
        yield (word,)
    full = (*recomputed[-1:], *smaller[-1:])
    if len(full) > 1:
        yield full
    if fsdp and full:
        yield (*fsdp, *full)
    if fsdp and bf16:
        yield (*fsdp, *bf16, *full)
    if recipe.parallel.offload == "none":
        for offload in plan.strategy.offloads[1:]:
            yield (f"parallel.offload={offload}", *full)
    if fsdp:
        yield (*fsdp, "parallel.offload=parameters", *full)
    for degree in (2, 4, 8):
        if plan.layout.world_size % degree == 0 and recipe.parallel.tensor == 1:
            yield (f"parallel.tensor={degree}", *full)


def _smaller_microbatches(batch: BatchPlan) -> Iterator[str]:
    micro, tokens = batch.micro_batch_size, batch.micro_batch_tokens
    key, largest = ("micro_batch_size", micro) if tokens is None else ("micro_batch_tokens", tokens)
    for size in halves(micro):
        yield f"training.{key}={largest * size // micro}"


def halves(size: int) -> Iterator[int]:
    """Yield halves of a size, rounded up, down to 1."""
    while size > 1:
        size = -(-size // 2)
        yield size


def traffic_by_axis(step: StepPlan) -> dict[tuple[str, str], Traffic]:
    """Return the calls and bytes of the collectives of a step, by operation and axis."""
    sums: dict[tuple[str, str], Traffic] = defaultdict(lambda: Traffic(0, 0))
    for collective, traffic in step.totals.traffic.items():
        # Names of c10d's operations begin or end with `_`, such as `allreduce_` and `_allgather_base_`.
        key = (collective.operation.strip("_"), step.axis_of(collective))
        sums[key] = plus(sums[key], traffic)
    return dict(sums)


def traffic_by_module(step: StepPlan, operation: str, axis: str) -> dict[str, int]:
    """Return the bytes of one operation over one axis by module, most first; `*` stands for any layer."""
    sums: Counter[str] = Counter()
    for collective, traffic in step.totals.traffic.items():
        if (collective.operation.strip("_"), step.axis_of(collective)) == (operation, axis):
            sums[re.sub(r"<\w+>|\b\d+\b", "*", collective.module)] += traffic.num_bytes
    return dict(sums.most_common())


def _is_between_machines(made: RecipePlan, axis: str) -> bool:
    """Return whether the ranks along an axis are on several machines."""
    return link_of(made.plan.layout, axis, made.devices.number).across


def bytes_by_link(made: RecipePlan, step: StepPlan) -> dict[str, int]:
    """Return the bytes of the collectives of a step inside of a machine and between machines."""
    sums = {"inside": 0, "between": 0}
    for (_, axis), (_, count) in traffic_by_axis(step).items():
        sums["between" if _is_between_machines(made, axis) else "inside"] += count
    return sums


@dataclass(frozen=True)
class TrainingCost:
    """The steps of a training, its likely hours, those of all GPUs, and their price if that of an hour is known.

    `tokens` are those of all steps, at the planned length of a text; None: the rows are no texts.
    """

    steps: int
    tokens: int | None
    hours: float
    gpu_hours: float
    price: float | None


def cost_of(made: RecipePlan, rows: int | None, price_of_hour: float | None) -> TrainingCost | None:
    """Return the cost of the whole training; None if its steps or the time of a step are unknown.

    `rows` is the number of rows of an epoch, if it is known.

    Raises:
        UsageError: there is a price, but no time.
    """
    steps = made.plan.recipe.training.max_steps if rows is None else made.plan.total_steps(rows)
    if made.time is None or steps is None:
        if price_of_hour is None:
            return None
        fix = "name the GPUs, as in --gpus 8xA100-80" if made.time is None else "add --rows N or training.max_steps=N"
        raise UsageError(f"`--price-per-gpu-hour` is {price_of_hour:g}, but the hours are unknown; {fix}")
    hours = batch_sizes(made.plan.recipe).full_steps(steps) * made.time.likely / 3600
    gpu_hours = hours * made.plan.layout.world_size
    of_texts = made.plan.recipe.task.other_inputs is None
    tokens = steps * made.plan.batch.global_batch_size * made.length if of_texts else None
    return TrainingCost(steps, tokens, hours, gpu_hours, None if price_of_hour is None else gpu_hours * price_of_hour)


def plan_notes(recipe: Recipe) -> list[str]:
    """Return notes on the shape of the model, and on parts of the recipe that the plan does not count."""
    fused = "`compile` is not counted: its layers fuse operations, so time and memory of the plan are upper bounds"
    return [*shape_notes(recipe), *[fused] * recipe.compile]


def as_object(made: RecipePlan, changes: Sequence[Choice]) -> Mapping[str, Any]:
    """Return the plan as JSON values; sizes are bytes."""
    return {
        "layout": str(made.plan.layout),
        "notes": [*plan_notes(made.plan.recipe), *filter(None, (made.devices.rates_note,))],
        "parameters": made.num_parameters,
        "length": made.length,
        "fits": made.fits,
        "needed_bytes": made.needed,
        "memory_bytes": made.devices.memory_bytes,
        "host_needed_bytes": made.host_needed,
        "host_memory_bytes": made.devices.host_bytes,
        "host_bytes_to_export": made.export_bytes,
        "host_bytes_of_checkpoints_in_memory": made.in_memory,
        "time": _time_as_object(made.time),
        "ranks": [rank_as_object(made, step) for step in made.steps],
        "changes": [{"overrides": list(change.overrides), "needed_bytes": change.made.needed} for change in changes],
    }


def rank_as_object(made: RecipePlan, step: StepPlan) -> Mapping[str, Any]:
    """Return the plan of one rank as JSON values."""
    return {
        "rank": step.rank,
        "peak_bytes": step.peak.num_bytes,
        "early_peak_bytes": step.early and step.early.peak.num_bytes,  # before `model.unfreeze_at_step`
        "peak": dict(step.peak.by_component),
        "peak_module": step.peak.place.module,
        "peak_in_backward": step.peak.place.backward,
        "resident": dict(step.resident),
        "host": dict(step.host),
        "host_bytes_at_start": step.loaded,
        "communication": [
            {
                "operation": operation,
                "axis": axis,
                "calls": calls,
                "bytes": count,
                "link": "between" if _is_between_machines(made, axis) else "inside",
                "modules": traffic_by_module(step, operation, axis),
            }
            for (operation, axis), (calls, count) in traffic_by_axis(step).items()
        ],
        "bytes_by_link": bytes_by_link(made, step),
        "flops": {str(kind).removeprefix("torch."): count for kind, count in step.totals.flops.items()},
        "model_flops": step.totals.model_flops,
    }


def _time_as_object(time: StepTime | None) -> Mapping[str, Any] | None:
    if time is None:
        return None
    return {
        "seconds": {"least": time.least, "likely": time.likely, "most": time.most},
        "parts": dict(time.parts),
        "samples_per_second": time.samples_per_second,
        "tokens_per_second": time.tokens_per_second,
        "mfu": time.mfu,
        "hfu": time.hfu,
        "pipeline": time.timeline
        and [
            {"idle_share": time.timeline.idle_share(rank), "most_microbatches_alive": time.timeline.most_alive(rank)}
            for rank in range(len(time.timeline.ranks))
        ],
    }
