"""The machines for a training: known GPUs, their number and layouts that fit, by hours and price.

One simulated step serves all devices: its operations do not depend on them, and each device gives its own times.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from trainer.base.errors import TrainerError, UsageError
from trainer.recipe.plan import RunPlan, plan_run
from trainer.recipe.reading.loading import ResolvedRecipe, load_recipe
from trainer.recipe.schema import Recipe
from trainer.tools.plan.derived import Law
from trainer.tools.plan.hardware import Devices, known_devices, parse_devices
from trainer.tools.plan.ledger import GRADIENTS, OPTIMIZER, PARAMETERS
from trainer.tools.plan.machine_request import MachineRequest
from trainer.tools.plan.prices import Prices
from trainer.tools.plan.rates import corrected
from trainer.tools.plan.recipe_plan import RecipePlan, cost_of, halves, plan_recipe, refusal, tokens_of
from trainer.tools.plan.searching import changing, layouts
from trainer.tools.plan.shapes import shape_notes, shaped
from trainer.tools.plan.timing import COMMUNICATION
from trainer.training.checking import require_described

_SIZES = ((1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 4))  # devices of a machine, and machines
_REFERENCES = {True: "H100", False: "V100-32"}  # with the project's kernels, and without them
_RECOMPUTED = "activation_checkpointing=full"
_MICRO = "training.micro_batch_size"
_NONE_FITS = "no layout that was tried fits"
_BEYOND = 1.3  # of the memory: a microbatch beyond the law may fit although the law needs this much
_WAITING = 0.05  # of a step: less waiting is not worth other layouts
_ROUNDS = 4  # microbatches for each stage of a pipeline
_MOST_TENSOR = 8
_MOST_ZERO = 1  # plans of ZeRO in a search
_MOST_CHECKED = 4  # of the best choices, which are simulated if they were derived
_UNKNOWN_STEPS = 1000
_RESTART_HOURS = 1 / 12
"""An assumption: five minutes until an interrupted run trains again."""

MAY_VARY = (
    "parallel.strategy", "parallel.tensor", "parallel.sequence", "parallel.pipeline.stages", "parallel.shard", _MICRO,
    "activation_checkpointing",
)  # fmt: skip


@dataclass(frozen=True)
class MachineChoice:
    """Devices on which the recipe fits, with a layout, and the cost of the training."""

    made: RecipePlan
    nodes: int
    overrides: tuple[str, ...]
    hours: float  # of the training, or of 1,000 steps; with what interruptions lose
    price: float | None  # None: no price is known
    lost: float = 0.0  # the share of the hours that interruptions lose

    @property
    def name(self) -> str:
        devices = self.made.devices
        return f"{f'{self.nodes}x' if self.nodes > 1 else ''}{devices.number}x{devices.name}"

    @property
    def memory_share(self) -> float:
        return self.made.needed / self.made.devices.memory_bytes

    @property
    def limit(self) -> str:
        """The part of a step that takes the longest."""
        assert self.made.time is not None
        parts = self.made.time.parts
        return max(parts, key=lambda part: parts[part])

    @property
    def gpu_hours(self) -> float:
        return self.hours * self.made.plan.layout.world_size

    def is_beaten_by(self, other: MachineChoice) -> bool:
        """Return whether another choice is as fast and as cheap, and better in one of both."""
        if other.price is None or self.price is None:
            return other.price is not None and self.price is None and other.hours <= self.hours
        pairs = (other.hours, other.price), (self.hours, self.price)
        return pairs[0] != pairs[1] and pairs[0][0] <= pairs[1][0] and pairs[0][1] <= pairs[1][1]


@dataclass(frozen=True)
class MachineResult:
    """The choices within the limits, the best first: those that no other beats, then the others."""

    choices: Sequence[MachineChoice]
    num_best: int  # choices that no other one beats in hours and price
    outside: int  # choices that fit the memory, but not the time or the budget
    left_out: Mapping[str, Sequence[str]]  # reasons, and the devices
    steps: int | None  # of the training; None: the hours are those of 1,000 steps
    prices: Prices
    kept: Sequence[str]  # the user's overrides that no layout changes
    num_plans: int
    seconds: float
    notes: Sequence[str]
    nearest: MachineChoice | None = None  # the fastest choice outside of the limits, if none is within


class _Fitting(NamedTuple):
    """A layout on a device."""

    overrides: tuple[str, ...]
    made: RecipePlan


class MachineSearch:
    """The search for machines; see `find_machines`."""

    def __init__(self, request: MachineRequest, resolved: ResolvedRecipe) -> None:
        self._request, self._resolved = request, resolved
        self._own = resolved.recipe.model_dump(mode="json")
        self._given = {word.partition("=")[0] for word in request.overrides}
        self._known: dict[tuple[Any, ...], RecipePlan | TrainerError] = {}  # simulated
        self._derived: dict[tuple[Any, ...], RecipePlan] = {}
        self._laws: dict[tuple[Any, ...], Law | TrainerError] = {}
        self._plans: dict[tuple[Any, ...], RunPlan | TrainerError] = {}
        self._length = request.length or tokens_of(resolved.recipe)
        self._recipes: dict[tuple[str, ...], Recipe] = {}
        self._zero_left = _MOST_ZERO
        self._whole: dict[str, int] | None = None  # the bytes of the whole model, by component
        self.num_plans = 0

    def choices(self, devices: Sequence[Devices], nodes: int) -> Iterator[tuple[Devices, _Fitting | str]]:
        """Yield each device with its fastest layout that fits, or the reason why none does."""
        for device in devices:
            reason, found = _NONE_FITS, None
            for words in self._layouts(device.number, nodes):
                fitting = self._largest(words, device, nodes)
                if isinstance(fitting, str):
                    reason = fitting
                    continue
                found = _faster(found, fitting)
                if fitting.made.plan.batch.micro_batch_size > 1:
                    break  # layouts that need less memory are slower
            for words in self._others(found, device, nodes):
                fitting = self._largest(words, device, nodes)
                if isinstance(fitting, _Fitting):
                    found = _faster(found, fitting)
            if found is not None and (zero := self._zero(found, device, nodes)) is not None:
                found = _faster(found, zero)
            yield device, found or reason

    def simulated(self, fitting: _Fitting, device: Devices, nodes: int) -> RecipePlan | None:
        """Return the plan of a layout on a device by its own simulation; None if it needs more memory, or plans."""
        with suppress(TrainerError):
            made = replace(self._simulated(fitting.overrides, device, nodes), devices=device)
            return made if made.fits else None
        return None

    def _layouts(self, local: int, nodes: int) -> Iterator[tuple[str, ...]]:
        world = local * nodes
        wanted = [("ddp", 1), ("fsdp", 1), ("fsdp", min(local, _MOST_TENSOR))] if world > 1 else [("ddp", 1)]
        return self._with_recomputation(self._rows(local, nodes)[(*key, 1)] for key in wanted)

    def _others(self, best: _Fitting | None, device: Devices, nodes: int) -> Iterator[tuple[str, ...]]:
        """Yield layouts that can be faster than the best one: hsdp on several machines, and stages.

        Stages have few messages, so they are faster only where others wait for theirs.
        """
        rows = self._rows(device.number, nodes)
        if nodes > 1:
            yield from self._with_recomputation([rows["hsdp", 1, 1]])
        stages = device.number
        if nodes == 1 and stages > 1 and (best is None or _waits(best, (stages - 1) / (_ROUNDS * stages))):
            yield from self._with_recomputation([rows["ddp", 1, stages]] if ("ddp", 1, stages) in rows else [])

    def _zero(self, best: _Fitting, device: Devices, nodes: int) -> _Fitting | None:
        """Return ZeRO-1 with the microbatch of the best layout, where it can be faster; None elsewhere.

        DDP, with the same messages, hides them. So ZeRO-1 can only win over sharded parameters, which are gathered for
        each microbatch, and only where these messages are waited for.
        """
        plan = best.made.plan
        if not plan.strategy.cuts_parameters or plan.layout.tp > 1 or not _waits(best) or not self._zero_left:
            return None
        if (row := self._rows(device.number, nodes).get(("zero1", 1, 1))) is None:  # a feature that may be deleted
            return None
        words = self._free(*row)
        kept = [word for word in best.overrides if word.startswith((_MICRO, _RECOMPUTED))]
        key = (*words, *kept)
        try:
            if self._least(self._plan(key, device, nodes)) > device.memory_bytes:
                return None
        except TrainerError:
            return None
        # DeepSpeed's buckets have a fixed size, so all layers are simulated, which takes as long as ten other plans.
        self._zero_left -= (key, device.number, nodes, _is_fused(device)) not in self._known
        with suppress(TrainerError):
            made = replace(self._simulated(key, device, nodes), devices=device)
            return _Fitting(key, made) if made.fits else None
        return None

    def _rows(self, local: int, nodes: int) -> dict[tuple[str, int, int], tuple[str, ...]]:
        return {
            (row.name, tensor, stages): words
            for row, tensor, stages, words in layouts(local, local * nodes)
            if "parallel.sequence=true" not in words
        }

    def _with_recomputation(self, rows: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
        found = []
        for row in rows:
            words = self._free(*row)
            found += [words, (*words, *self._free(_RECOMPUTED))]
        return iter(dict.fromkeys(found))

    def _free(self, *words: str) -> tuple[str, ...]:
        return changing(words, self._own, self._given)

    def _largest(self, words: tuple[str, ...], device: Devices, nodes: int) -> _Fitting | str:
        """Return a layout with the largest microbatch that fits a device: all rows of a rank, or halves of them."""
        try:
            plan = self._plan(words, device, nodes)
            if (reason := refusal(device, plan)) is not None:
                return reason.replace(device.name, "this GPU")
            if self._least(plan) > device.memory_bytes:
                return _NONE_FITS
            for size in self._sizes(plan):
                own = (*words, *size)
                made = replace(self._made(words, size, device, nodes), devices=device)
                if made.fits:
                    return _Fitting(own, made)
        except TrainerError as error:
            return str(error).splitlines()[0].replace(device.name, "this GPU")
        return _NONE_FITS

    def _least(self, plan: RunPlan) -> float:
        """Return bytes that a rank needs under a layout in any case: its part of the weights and of their states."""
        if self._whole is None:
            self._whole = {}
            with suppress(TrainerError):
                words = self._free(*self._rows(1, 1)["ddp", 1, 1], *([f"{_MICRO}=1"] if self._sizes(plan)[0] else []))
                (step,) = self._simulated(words, parse_devices("1xH100"), 1).steps
                self._whole = {**step.resident, GRADIENTS: step.gradients}
        layout, states = plan.layout, self._whole.get(OPTIMIZER, 0)
        kept = self._whole.get(PARAMETERS, 0) + self._whole.get(GRADIENTS, 0)
        if plan.strategy.package:  # ZeRO-1 shards the states alone
            return kept + states / layout.world_size
        shards = layout.dp_shard if plan.strategy.cuts_parameters else 1
        return (kept + states) / (shards * layout.ep * layout.tp * layout.pp)

    def _made(self, words: tuple[str, ...], size: tuple[str, ...], device: Devices, nodes: int) -> RecipePlan:
        """Return the plan of a layout with a microbatch: by its law, or simulated where that is not certain."""
        own = (*words, *size)
        plan = self._plan(own, device, nodes)
        is_given = _MICRO in self._given or plan.batch.micro_batch_tokens is not None
        law = None if is_given else self._law(words, device, nodes)
        if law is None:
            return self._simulated(own, device, nodes)
        key = (own, device.number, nodes, _is_fused(device))
        found = self._derived.get(key) or self._derived.setdefault(key, law.plan(plan, device))
        if (reason := refusal(device, plan, found.steps)) is not None:
            raise UsageError(reason)
        # All rows at once are beyond the law, and meet no earlier gradients.
        is_beyond = plan.batch.micro_batch_size > law.large.plan.batch.micro_batch_size
        if is_beyond and found.needed < _BEYOND * device.memory_bytes:
            return self._simulated(own, device, nodes)
        return found

    def _law(self, words: tuple[str, ...], device: Devices, nodes: int) -> Law | None:
        """Return the law of a layout; None if its ranks have too few rows for one."""
        plan = self._plan(words, device, nodes)
        # One data rank sends nothing, so it has a law of its own.
        key = (words, _is_fused(device), plan.layout.pp > 1 and device.number, plan.layout.data_parallel_size == 1)
        if key not in self._laws:
            rows = plan.batch.rank_batch_size
            sizes = [1, rows // 2] if plan.layout.pp == 1 else [1, max(1, rows // (2 * plan.layout.pp))]
            if sizes[1] < 2:
                return None
            try:
                small, large = (
                    self._simulated((*words, *self._free(f"{_MICRO}={size}")), device, nodes) for size in sizes
                )
                self._laws[key] = Law(small, large)
            except TrainerError as error:
                self._laws[key] = error
        found = self._laws[key]
        if isinstance(found, TrainerError):
            raise found
        return found

    def _sizes(self, plan: RunPlan) -> list[tuple[str, ...]]:
        """Return the overrides of microbatches to try, from all rows of a rank on; empty ones for the user's size."""
        if _MICRO in self._given or plan.batch.micro_batch_tokens is not None:
            return [()]
        rows = plan.batch.rank_batch_size
        if plan.layout.pp > 1:
            rows = max(1, rows // (_ROUNDS * plan.layout.pp))  # fewer microbatches make the bubble long
        sizes = [self._free(f"{_MICRO}={size}") for size in dict.fromkeys((rows, *halves(rows)))]
        return sizes

    def _load(self, words: Sequence[str]) -> ResolvedRecipe:
        return load_recipe(self._request.recipe, [*self._request.overrides, *words], needs_data=False)

    def _recipe(self, words: tuple[str, ...]) -> Recipe:
        """Return the recipe with overrides; the size of a microbatch changes without another load."""
        others = tuple(word for word in words if not word.startswith(f"{_MICRO}="))
        if others not in self._recipes:
            self._recipes[others] = self._load(others).recipe
        recipe = self._recipes[others]
        if others == words:
            return recipe
        (size,) = (int(word.partition("=")[2]) for word in words if word not in others)
        return recipe.model_copy(update={"training": recipe.training.model_copy(update={"micro_batch_size": size})})

    def _plan(self, words: tuple[str, ...], device: Devices, nodes: int) -> RunPlan:
        key = (words, device.number, nodes)
        if key not in self._plans:
            try:
                recipe = self._recipe(words)
                self._plans[key] = plan_run(recipe, device.number * nodes, device.number)
            except TrainerError as error:
                self._plans[key] = error
        found = self._plans[key]
        if isinstance(found, TrainerError):
            raise found
        return found

    def _simulated(self, words: tuple[str, ...], device: Devices, nodes: int) -> RecipePlan:
        """Return the step on a reference device, which is simulated once for all devices.

        Raises:
            TrainerError: the recipe cannot be laid out like this, or the device cannot compute it.
        """
        fused = _is_fused(device)
        key = (words, device.number, nodes, fused)
        if key not in self._known:
            if self.num_plans >= self._request.most_plans:
                raise UsageError("not planned; --plans N allows more plans")
            self.num_plans += 1
            reference = parse_devices(f"{device.number}x{_REFERENCES[fused]}")
            try:
                self._known[key] = plan_recipe(self._load(words), reference, nodes, self._length)
            except TrainerError as error:
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, TrainerError):
            raise found
        if (reason := refusal(device, found.plan, found.steps)) is not None:
            raise UsageError(reason)
        return found


def _is_fused(device: Devices) -> bool:
    return device.machine is not None and device.machine.runs_kernels


def _waits(fitting: _Fitting, loss: float = _WAITING) -> bool:
    """Return whether a step waits for messages for more than another layout loses, as a share of the other work."""
    assert fitting.made.time is not None
    waiting = fitting.made.time.parts[COMMUNICATION]
    return waiting > loss * (fitting.made.time.likely - waiting)


def _faster(found: _Fitting | None, other: _Fitting) -> _Fitting:
    return other if found is None or _seconds(other) < _seconds(found) else found


def _seconds(fitting: _Fitting) -> float:
    assert fitting.made.time is not None
    return fitting.made.time.likely


def find_machines(request: MachineRequest, resolved: ResolvedRecipe) -> MachineResult:
    """Plan a recipe on 1 to 8 of each known GPU, then on several machines if none fits or is within the limits.

    Overrides of the user stay. Strategy, tensor parallelism, microbatches and recomputation of the recipe may vary.

    Raises:
        TrainerError: the recipe is wrong, or its steps are unknown and a limit needs them.
    """
    begin = time.perf_counter()
    prices = Prices.read(request.prices)
    with suppress(UsageError):
        require_described(shaped(plan_run(resolved.recipe, 1)))
    search = MachineSearch(request, resolved)
    everything, reasons, steps = _on_all_sizes(search, request, prices)
    if steps is None and (request.within is not None or request.at_most is not None):
        raise UsageError(
            "`--within` and `--at-most` need the steps of the training, but its rows are unknown; add --rows N or"
            " training.max_steps=N"
        )
    within = sorted(
        (one for one in everything if request.allows(one.hours, one.price)),
        key=lambda one: request.order(one.hours, one.price),
    )
    within, best = _checked(search, request, within, prices)
    return MachineResult(
        choices=[*best, *(one for one in within if one not in best)],
        num_best=len(best),
        outside=len(everything) - len(within),
        left_out=_by_reason(reasons, {one.made.devices.name for one in everything}),
        steps=steps,
        prices=prices,
        kept=request.overrides,
        num_plans=search.num_plans,
        seconds=time.perf_counter() - begin,
        notes=[*shape_notes(resolved.recipe), *_rates_notes(everything)],
        nearest=None if within else min(everything, key=lambda one: one.hours, default=None),
    )


def _checked(
    search: MachineSearch, request: MachineRequest, found: list[MachineChoice], prices: Prices
) -> tuple[list[MachineChoice], list[MachineChoice]]:
    """Simulate the best of some choices, which may be derived; return all, and those that no other beats."""
    checked: set[tuple[str, tuple[str, ...]]] = set()
    for _ in range(_MOST_CHECKED):
        best = [one for one in found if not any(one.is_beaten_by(other) for other in found)]
        new = next((one for one in best if (one.name, one.overrides) not in checked), None)
        if new is None:
            break
        checked.add((new.name, new.overrides))
        found.remove(new)
        made = search.simulated(_Fitting(new.overrides, new.made), new.made.devices, new.nodes)
        if made is not None:
            choice, _ = _choice(request, made, new.nodes, new.overrides, prices)
            if request.allows(choice.hours, choice.price):
                found.append(choice)
        found.sort(key=lambda one: request.order(one.hours, one.price))
    return found, [one for one in found if not any(one.is_beaten_by(other) for other in found)]


def _on_all_sizes(
    search: MachineSearch, request: MachineRequest, prices: Prices
) -> tuple[list[MachineChoice], dict[str, str], int | None]:
    """Return the choices of all devices and sizes, reasons against devices, and the steps of the training."""
    names = [name for name in known_devices() if name != "CPU"]
    everything: list[MachineChoice] = []
    reasons: dict[str, str] = {}
    steps: int | None = None
    for local, nodes in _SIZES:
        devices = [corrected(parse_devices(f"{local}x{name}"), request.rates) for name in names]
        for device, found in search.choices(devices, nodes):
            if isinstance(found, str):
                reasons.setdefault(device.name, found)
                continue
            choice, steps = _choice(request, found.made, nodes, found.overrides, prices)
            everything.append(choice)
        # A further machine adds messages between machines; one is enough if it ends in time.
        if local == 8 and any(request.allows(one.hours, one.price) for one in everything):
            break
    return everything, reasons, steps


def _by_reason(reasons: Mapping[str, str], fitting: Container[str]) -> dict[str, list[str]]:
    """Return the devices on which nothing fits, by the reason."""
    grouped: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        if name not in fitting:
            grouped.setdefault(reason, []).append(name)
    return grouped


def _rates_notes(choices: Sequence[MachineChoice]) -> list[str]:
    return list(dict.fromkeys(one.made.devices.rates_note for one in choices if one.made.devices.rates_note))


def _choice(
    request: MachineRequest, made: RecipePlan, nodes: int, words: tuple[str, ...], prices: Prices
) -> tuple[MachineChoice, int | None]:
    cost = cost_of(made, request.rows, None)
    assert made.time is not None
    steps = None if cost is None else cost.steps
    hours = made.time.likely * (steps or _UNKNOWN_STEPS) / 3600
    lost = 0.0
    if request.spot is not None:
        lost = lost_share(_interval_hours(made, request.rows, hours), request.spot / nodes)
        hours *= 1 + lost
    name = made.devices.name
    of_hour = prices.spot.get(name) if request.spot is not None else prices.on_demand.get(name)
    choice = MachineChoice(made, nodes, words, hours, None, lost)
    return replace(choice, price=None if of_hour is None else choice.gpu_hours * of_hour), steps


def lost_share(interval: float, between: float) -> float:
    """Return the share of the time that interruptions lose: half an interval, and the restart, of the time between two.

    This is the first order of Young 1974 ("A first order approximation to the optimum checkpoint interval"). A
    checkpoint is written while the run trains, so that its time does not count.

    Args:
        interval: the hours between two checkpoints.
        between: the mean hours between two interruptions.
    """
    return (interval / 2 + _RESTART_HOURS) / between


def best_interval(writing: float, between: float) -> float:
    """Return the interval with the least loss: the root of twice the time of writing times that between interruptions.

    See Young 1974, and Daly 2006 ("A higher order estimate of the optimum checkpoint interval for restart dumps"). All
    times are in the same unit.
    """
    return math.sqrt(2 * writing * between)


def _interval_hours(made: RecipePlan, rows: int | None, hours: float) -> float:
    """Return the hours between checkpoints of a recipe; those of the whole training without any."""
    every = made.plan.recipe.checkpoint.every
    assert made.time is not None
    if every is None:
        return hours
    if every.unit == "steps":
        return min(hours, every.count * made.time.likely / 3600)
    return (
        hours if rows is None else min(hours, every.count * made.plan.steps_per_epoch(rows) * made.time.likely / 3600)
    )


def as_object(result: MachineResult) -> Mapping[str, Any]:
    """Return the result as JSON values; hours are of the training, or of 1,000 steps if `steps` is null."""
    return {
        "steps": result.steps,
        "currency": result.prices.currency,
        "prices": result.prices.source,
        "choices": [_row(one, index < result.num_best) for index, one in enumerate(result.choices)],
        "outside_the_limits": result.outside,
        "nearest": result.nearest and _row(result.nearest, False),
        "left_out": result.left_out,
        "kept": result.kept,
        "may_vary": MAY_VARY,
        "notes": result.notes,
        "plans": result.num_plans,
        "seconds": result.seconds,
    }


def _row(one: MachineChoice, is_best: bool) -> Mapping[str, Any]:
    made = one.made
    assert made.time is not None
    return {
        "gpus": f"{made.devices.number}x{made.devices.name}", "nodes": one.nodes, "overrides": one.overrides,
        "hours": one.hours, "price": one.price, "gpu_hours": one.gpu_hours, "lost_to_interruptions": one.lost,
        "seconds_of_a_step": made.time.likely, "needed_bytes": made.needed, "memory_bytes": made.devices.memory_bytes,
        "limit": one.limit, "is_best": is_best,
    }  # fmt: skip


def reasons_of(result: MachineResult, most: int = 2) -> list[str]:
    """Return the most frequent reasons why devices are left out, with their names."""
    counts = Counter({reason: len(names) for reason, names in result.left_out.items()})
    return [f"{', '.join(result.left_out[reason])}: {reason}" for reason, _ in counts.most_common(most)]
