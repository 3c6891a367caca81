"""Plans of further microbatches and ranks, from the simulated steps of two microbatches under the same layout.

Between two sizes of a microbatch, bytes and operations grow with its rows. Ranks that shard parameters divide the bytes
that stay between two steps, and the update. The other parts of a step do not depend on the number of data ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainer.recipe.plan import RunPlan
from trainer.tools.plan.hardware import Devices
from trainer.tools.plan.ledger import Peak, Totals
from trainer.tools.plan.recipe_plan import RecipePlan
from trainer.tools.plan.step_plan import StepPlan
from trainer.tools.plan.work import OPTIMIZER_STEP


@dataclass(frozen=True)
class Law:
    """A layout with its plans for a small and for a large microbatch, on the same number of ranks."""

    small: RecipePlan
    large: RecipePlan

    def plan(self, plan: RunPlan, devices: Devices) -> RecipePlan:
        """Return the plan of another microbatch, or of another number of data ranks."""
        first, last = (made.plan.batch.micro_batch_size for made in (self.small, self.large))
        place = (plan.batch.micro_batch_size - first) / (last - first) if last > first else 0.0
        pairs = zip(self.small.steps, self.large.steps, strict=True)
        return RecipePlan(plan, devices, self.small.length, tuple(self._step(*pair, place, plan) for pair in pairs))

    def _step(self, small: StepPlan, large: StepPlan, place: float, plan: RunPlan) -> StepPlan:
        shards = self.small.plan.layout.dp_shard / plan.layout.dp_shard
        rest = [step.peak.num_bytes - _kept(step) for step in (small, large)]
        peak = shards * _kept(small) + rest[0] + place * (rest[1] - rest[0])
        first, last, axes = _named(small), _named(large), _axes(small)
        repeated = self._repeated(first, last, axes)
        once = _parts(first, axes, repeated, False)
        each = [
            _scaled(_parts(totals, axes, repeated, True), 1 / made.plan.batch.num_microbatches)
            for totals, made in ((first, self.small), (last, self.large))
        ]
        number = plan.batch.num_microbatches
        totals = _scaled(once, 1.0, shards)
        for one, share in zip(each, (1 - place, place), strict=True):
            totals = totals.plus(_scaled(one, number * share))
        whole = Peak(round(peak), {}, small.peak.place)
        resident = {name: round(count * shards) for name, count in small.resident.items()}
        return replace(
            small, resident=resident, gradients=round(shards * small.gradients), peaks={whole.place: whole},
            totals=totals, axes=axes,
        )  # fmt: skip

    def _repeated(self, small: Totals, large: Totals, axes: Mapping[str, str]) -> set[Any]:
        """Return the collectives that each microbatch repeats."""
        if self.small.plan.batch.num_microbatches == self.large.plan.batch.num_microbatches:
            return {*small.of_microbatches(axes).traffic}
        first, last = small.traffic, large.traffic
        calls = {key: [traffic[key].calls for traffic in (first, last) if key in traffic] for key in first | last}
        return {key for key, (one, *other) in calls.items() if [one] != other}


def _kept(step: StepPlan) -> int:
    """Return the bytes that data ranks divide if they shard: those between two steps, and the gradients."""
    return sum(step.resident.values()) + step.gradients


def _axes(step: StepPlan) -> dict[str, str]:
    return {axis: axis for axis in {*step.axes.values(), "all"}}


def _named(step: StepPlan) -> Totals:
    """Return totals with the axes of process groups as their names, which two simulations share."""
    totals = step.totals

    def named(key: Any) -> Any:
        return replace(key, group=step.axes.get(key.group, "all"))

    traffic: dict[Any, Any] = {}
    for key, amount in totals.traffic.items():
        other = traffic.get(named(key))
        traffic[named(key)] = amount if other is None else other._make(map(sum, zip(amount, other, strict=True)))
    behind = {(named(key), kind): amount for (key, kind), amount in totals.behind.items()}
    return Totals(traffic, dict(totals.work), totals.moved, behind)


def _parts(totals: Totals, axes: Mapping[str, str], repeated: set[Any], of_each: bool) -> Totals:
    """Return the part of a step that each microbatch repeats, or the rest of it."""
    each = totals.of_microbatches(axes)
    return Totals(
        {key: amount for key, amount in totals.traffic.items() if (key in repeated) == of_each},
        {key: amount for key, amount in totals.work.items() if (key in each.work) == of_each},
        each.moved if of_each else 0,
        each.behind if of_each else {},
    )


def _scaled(totals: Totals, factor: float, update: float = 1.0) -> Totals:
    """Return the totals `factor` times, and those of the update `update` times that."""

    def table(amounts: Mapping[Any, Any]) -> dict[Any, Any]:
        found = {}
        for key, amount in amounts.items():
            times = factor * (update if getattr(key, "phase", "") == OPTIMIZER_STEP else 1.0)
            found[key] = amount._make(times * value for value in amount)
        return found

    return Totals(table(totals.traffic), table(totals.work), round(factor * totals.moved), table(totals.behind))
