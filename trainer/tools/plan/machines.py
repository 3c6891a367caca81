"""The machines for a training: known GPUs, their number and layouts that fit, by hours and price.

One simulated step serves all devices: its operations do not depend on them, and each device gives its own times.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from trainer.base.errors import TrainerError, UsageError
from trainer.recipe.plan import RunPlan, plan_run
from trainer.recipe.reading.loading import ResolvedRecipe, load_recipe
from trainer.tools.plan.hardware import Devices, known_devices, parse_devices
from trainer.tools.plan.machine_request import MachineRequest
from trainer.tools.plan.prices import Prices
from trainer.tools.plan.rates import corrected
from trainer.tools.plan.recipe_plan import RecipePlan, cost_of, halves, plan_recipe, refusal, tokens_of
from trainer.tools.plan.searching import changing, layouts
from trainer.tools.plan.shapes import shape_notes, shaped
from trainer.training.checking import require_described

_SIZES = ((1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 4))  # devices of a machine, and machines
_REFERENCES = {True: "H100", False: "V100-32"}  # with the project's kernels, and without them
_RECOMPUTED = "activation_checkpointing=full"
_MICRO = "training.micro_batch_size"
_NONE_FITS = "no layout that was tried fits"
_UNKNOWN_STEPS = 1000
_RESTART_HOURS = 1 / 12
"""An assumption: five minutes until an interrupted run trains again."""

MAY_VARY = ("parallel.strategy", "parallel.tensor", "parallel.sequence", _MICRO, "activation_checkpointing")


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
    """A simulated step on a reference device, whose memory and operations hold for other devices."""

    overrides: tuple[str, ...]
    made: RecipePlan


class MachineSearch:
    """The search for machines; see `find_machines`."""

    def __init__(self, request: MachineRequest, resolved: ResolvedRecipe) -> None:
        self._request, self._resolved = request, resolved
        self._own = resolved.recipe.model_dump(mode="json")
        self._given = {word.partition("=")[0] for word in request.overrides}
        self._known: dict[tuple[Any, ...], _Fitting | TrainerError] = {}
        self._length = request.length or tokens_of(resolved.recipe)
        self._full: set[str] = set()  # devices that do not hold all rows of a rank under some layout
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
                faster = found is None or _time_of(fitting, device) < _time_of(found, device)
                found = fitting if faster else found
                if fitting.made.plan.batch.micro_batch_size > 1:
                    break  # layouts that need less memory are slower
            yield device, found or reason

    def _layouts(self, local: int, nodes: int) -> Iterator[tuple[str, ...]]:
        world = local * nodes
        wanted = [("ddp", 1)] if world == 1 else [("ddp", 1), ("fsdp", 1), ("fsdp", min(local, 8))]
        rows = {
            (row.name, tensor): words
            for row, tensor, stages, words in layouts(local, world)
            if stages == 1 and "parallel.sequence=true" not in words
        }
        found = []
        for key in wanted:
            words = self._free(*rows[key])
            found += [words, (*words, *self._free(_RECOMPUTED))]
        return iter(dict.fromkeys(found))

    def _free(self, *words: str) -> tuple[str, ...]:
        return changing(words, self._own, self._given)

    def _largest(self, words: tuple[str, ...], device: Devices, nodes: int) -> _Fitting | str:
        """Return a layout with the largest microbatch that fits a device: all rows of a rank, or halves of them."""
        try:
            plan = plan_run(self._load(words).recipe, device.number * nodes, device.number)
        except TrainerError as error:
            return str(error).splitlines()[0]
        if (reason := refusal(device, plan)) is not None:
            return reason.replace(device.name, "this GPU")
        sizes = self._sizes(plan)
        tried: dict[int, _Fitting] = {}

        def fits(index: int) -> bool:
            found = self._planned((*words, *sizes[index][1]), device, nodes)
            tried[index] = found
            return replace(found.made, devices=device).fits

        try:
            first, last = 1, len(sizes) - 1
            # Where all rows did not fit before, the smallest size comes first: it often shows that none fits.
            if (device.name in self._full and not fits(last)) or (not last and not fits(0)):
                return _NONE_FITS
            if fits(0):
                return tried[0]
            self._full.add(device.name)
            if not fits(last):
                return _NONE_FITS
            # Memory grows with rows about linearly, so that two plans give a guess that another plan verifies.
            while (index := _guess(tried, [rows for rows, _ in sizes], first, last, device)) < last:
                if fits(index):
                    return tried[index]
                first = index + 1
        except TrainerError as error:
            return str(error).splitlines()[0].replace(device.name, "this GPU")
        return tried[last]

    def _sizes(self, plan: RunPlan) -> list[tuple[int, tuple[str, ...]]]:
        """Return the rows of microbatches to try, from all of a rank on, with their overrides."""
        if _MICRO in self._given or plan.batch.micro_batch_tokens is not None:
            return [(plan.batch.micro_batch_size, ())]
        rows = plan.batch.rank_batch_size
        return [(size, self._free(f"{_MICRO}={size}")) for size in dict.fromkeys((rows, *halves(rows)))]

    def _load(self, words: Sequence[str]) -> ResolvedRecipe:
        return load_recipe(self._request.recipe, [*self._request.overrides, *words], needs_data=False)

    def _planned(self, words: tuple[str, ...], device: Devices, nodes: int) -> _Fitting:
        """Return the step on a reference device, which is simulated once for all devices.

        Raises:
            TrainerError: the recipe cannot be laid out like this, or the device cannot compute it.
        """
        fused = device.machine is not None and device.machine.runs_kernels
        key = (words, device.number, nodes, fused)
        if key not in self._known:
            if self.num_plans >= self._request.most_plans:
                raise UsageError("not planned; --plans N allows more plans")
            self.num_plans += 1
            reference = parse_devices(f"{device.number}x{_REFERENCES[fused]}")
            try:
                self._known[key] = _Fitting(words, plan_recipe(self._load(words), reference, nodes, self._length))
            except TrainerError as error:
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, TrainerError):
            raise found
        if (reason := refusal(device, found.made.plan, found.made.steps)) is not None:
            raise UsageError(reason)
        return found


def _guess(tried: Mapping[int, _Fitting], sizes: Sequence[int], first: int, last: int, device: Devices) -> int:
    """Return the place of the largest size that fits by a line through two plans; `last`, which fits, without one."""
    rows = sorted((sizes[index], one.made.needed) for index, one in tried.items())
    (low, less), (high, more) = rows[0], rows[1]
    slope = (more - less) / (high - low)
    fitting = (index for index in range(first, last) if less + slope * (sizes[index] - low) <= device.memory_bytes)
    return next(fitting, last)


def _time_of(fitting: _Fitting, device: Devices) -> float:
    made = replace(fitting.made, devices=device).time
    assert made is not None
    return made.likely


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
    best = [one for one in within if not any(one.is_beaten_by(other) for other in within)]
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
            choice, steps = _choice(request, replace(found.made, devices=device), nodes, found.overrides, prices)
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
