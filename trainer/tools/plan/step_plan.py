"""The plan of one step of one rank: its memory, communication and arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from trainer.parallel.placement import EXPERT_AXIS
from trainer.tools.plan.ledger import BATCH, LOSS, Collective, Peak, Place, Totals


@dataclass(frozen=True)
class StepPlan:
    """The memory, communication and arithmetic of one step of one rank."""

    rank: int
    stage: int  # its index along the pipeline axis
    resident: Mapping[str, int]  # the bytes alive between two steps, by component
    peaks: Mapping[Place, Peak]  # the moment with the most bytes alive at each place
    totals: Totals  # collectives and operations of the step
    axes: Mapping[str, str]  # the axis of each process group, by the group's name
    # the bytes alive at the begin of the first backward pass, by component
    held: Mapping[str, int] = field(default_factory=dict)
    gradients: int = 0  # the most bytes of gradients
    # the bytes of the host's peak in the step, by component; empty without `parallel.offload`
    host: Mapping[str, int] = field(default_factory=dict)
    share: int = 0  # the bytes of the rank's share of a checkpoint
    loaded: int = 0  # the bytes of the fp32 weights that the rank builds on the host at the start
    saved: int = 0  # the bytes of the fp32 weights of its stage in an exported model
    # a step before `model.unfreeze_at_step`, if its rank has parameters without an update there
    early: StepPlan | None = None

    @cached_property
    def peak(self) -> Peak:
        """The moment of the step with the most bytes alive."""
        return max(self.peaks.values(), key=lambda peak: peak.num_bytes)

    def axis_of(self, collective: Collective) -> str:
        """Return the axis of a collective; `all` if its group is unknown."""
        axis = self.axes.get(collective.group, "all")
        # Where all data ranks divide the experts, the groups are one; only tokens travel by this operation there.
        return EXPERT_AXIS if axis == "dp" and "alltoall" in collective.operation else axis

    def followed_by(self, update: Peak, totals: Totals) -> StepPlan:
        """Return the plan with an update after this step, from its peak, in which no batch counts, and its totals."""
        loss = update.by_component.get(LOSS, 0) + self.resident.get(LOSS, 0)  # such as the buffers of a pipeline
        alive = {**update.by_component, LOSS: loss, BATCH: self.resident.get(BATCH, 0)}
        peak = Peak(sum(alive.values()), alive, update.place)
        before = self.peaks.get(peak.place, peak)
        highest = max(before, peak, key=lambda found: found.num_bytes)
        return replace(self, peaks={**self.peaks, peak.place: highest}, totals=self.totals.plus(totals))
