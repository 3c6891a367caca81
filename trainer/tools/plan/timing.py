"""The time of a training step, from the work and the collectives that a plan counted and the speeds of a machine.

Costs of collectives follow the ring of Patarasuk and Yuan 2009 ("Bandwidth optimal all-reduce algorithms") and the tree
of Thakur et al. 2005 ("Optimization of collective communication operations in MPICH"); the faster one counts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from trainer.parallel.mesh import AXES
from trainer.recipe.plan import Layout, RunPlan
from trainer.tools.plan.hardware import LEAST, LIKELY, MOST, Machine, Speed, kernel_name
from trainer.tools.plan.ledger import POINT_TO_POINT
from trainer.tools.plan.simulated_step import StepPlan
from trainer.tools.plan.work import (
    ATTENTION,
    BACKWARD,
    FORWARD,
    INTEGER,
    OPTIMIZER_STEP,
    PHASES,
    RECOMPUTED,
    REDUCTION,
    SPECIAL,
    VIEW,
    Kind,
    Work,
)  # fmt: skip
from trainer.tools.report.timeline import BACKWARD as FULL_BACKWARD
from trainer.tools.report.timeline import FORWARD as FULL_FORWARD
from trainer.tools.report.timeline import Action, Timeline, order_of, simulate

_TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int64: "int64", torch.bool: "bool",
}  # fmt: skip
_DATA_AXES = frozenset(("dp", "dp_replicate", "dp_shard"))


@dataclass(frozen=True)
class StepTime:
    """The time of one optimizer step.

    Args:
        least: the seconds if the device reaches the largest achievable share of its peaks.
        likely: the seconds in the middle.
        most: the seconds with the smallest share.
        parts: the likely seconds of each part; their sum is `likely`.
        samples_per_second: rows of the global batch per second.
        tokens_per_second: their tokens, with padding.
        mfu: the floating-point operations of the model, without recomputation, as a share of the devices' peak.
        timeline: the likely timeline of one pass through the pipeline; None without one.
    """

    least: float
    likely: float
    most: float
    parts: Mapping[str, float]
    samples_per_second: float
    tokens_per_second: float
    mfu: float
    timeline: Timeline | None


COMPUTE, COMMUNICATION, COPIES, BUBBLE, OPTIMIZER, HOST = (
    "compute", "exposed communication", "copies of offload", "pipeline bubble", "optimizer", "host",
)  # fmt: skip


def step_time(plan: RunPlan, steps: Sequence[StepPlan], machine: Machine, length: int = 1) -> StepTime:
    """Return the time of one optimizer step.

    Args:
        plan: the recipe and its layout.
        steps: the plan of one rank of each pipeline stage.
        machine: the machines.
        length: the tokens of each text.
    """
    machine = machine.with_tf32() if plan.recipe.tf32 else machine
    parts: dict[int, dict[str, float]] = {}
    timeline = None
    for level in (LEAST, LIKELY, MOST):
        estimate = _Estimate(plan, steps, machine, machine.speed(level))
        parts[level] = estimate.parts()
        timeline = estimate.timeline if level == LIKELY else timeline
    least, likely, most = (sum(parts[level].values()) for level in (LEAST, LIKELY, MOST))
    samples = plan.batch.global_batch_size / likely
    ideal = sum(_ideal_seconds(step.totals.work, machine) for step in steps) / len(steps)
    return StepTime(least, likely, most, parts[LIKELY], samples, samples * length, ideal / likely, timeline)


def _ideal_seconds(work: Work, machine: Machine) -> float:
    """Return the seconds of the model's floating-point operations at the peak of the device."""
    return sum(
        amount.flops / machine.peak(type_name(kind.dtype)) for kind, amount in work.items() if kind.phase != RECOMPUTED
    )


def type_name(dtype: torch.dtype | None) -> str:
    """Return the name of a type in hardware files; types without a name count as fp32."""
    return _TYPES.get(dtype or torch.float32, "fp32")


def operation_seconds(kind: Kind, flops: float, num_bytes: float, speed: Speed) -> float:
    """Return the seconds of one operation.

    An operation that was measured takes the seconds between its measured sizes. Beyond them, they change as those of
    its class do. Others take the seconds of their arithmetic or of their memory, the longer ones.
    """
    dtype = type_name(kind.dtype)
    tables = {
        ATTENTION: speed.attention, SPECIAL: speed.special, REDUCTION: speed.reduction, INTEGER: speed.integer,
    }  # fmt: skip
    memory = tables.get(kind.operation, speed.memory)
    product = speed.matmul.get(dtype, speed.matmul["fp32"])
    kernel = speed.kernels.get(kernel_name(kind.name, dtype))
    if kernel is None:
        moved = memory.seconds(num_bytes)
        return max(moved, product.seconds(flops)) if flops else moved
    general, size = (product, flops) if flops else (memory, num_bytes)
    nearest = min(max(size, kernel.points[0][0]), kernel.points[-1][0])
    return kernel.seconds(nearest) * general.seconds(size) / general.seconds(nearest)


@dataclass(frozen=True)
class Link:
    """The way between the ranks of a group.

    Args:
        ranks: the ranks of the group.
        together: its ranks on one machine.
        local_ranks: all ranks of a machine, which share its network.
    """

    ranks: int
    together: int
    local_ranks: int

    @property
    def across(self) -> bool:
        """Whether the group is on several machines."""
        return self.ranks > self.together


def link_of(layout: Layout, axis: str, local_ranks: int) -> Link:
    """Return the link between the ranks along an axis, or between all ranks if the axis is unknown."""
    sizes = dict(zip(AXES, (layout.pp, layout.dp_replicate, layout.dp_shard, layout.tp), strict=True))
    last = "dp_shard" if axis == "dp" else axis
    if last not in sizes:
        ranks, stride = layout.world_size, 1
    else:
        ranks = layout.data_parallel_size if axis == "dp" else sizes[axis]
        stride = math.prod(sizes[inner] for inner in AXES[AXES.index(last) + 1 :])
    return Link(ranks, max(1, min(ranks, local_ranks // stride)), local_ranks)


def collective_seconds(operation: str, num_bytes: float, link: Link, speed: Speed) -> float:
    """Return the seconds of one collective.

    Args:
        operation: the name of torch's operation.
        num_bytes: the bytes of its largest tensor.
        link: the way between the ranks.
        speed: the speed of the device and its links.
    """
    ranks = link.ranks
    if ranks == 1:
        return 0.0

    inside = speed.collectives.get("send" if operation in POINT_TO_POINT else operation, speed.inside)

    def send(size: float) -> float:
        if not link.across:
            return inside.seconds(size)
        # The groups of all ranks of a machine send at the same time.
        outside = speed.between.latency + size / speed.between.rate * link.local_ranks / link.together
        return max(outside, inside.seconds(size)) if link.together > 1 else outside

    if operation in POINT_TO_POINT:
        return send(num_bytes)
    rounds = 2 if "allreduce" in operation else 1
    ring = rounds * (ranks - 1) * send(num_bytes / ranks)
    tree = rounds * math.ceil(math.log2(ranks)) * send(num_bytes)
    return min(ring, tree)


SUMS, SHARDS, TENSOR, STAGES = "sums", "shards", "tensor", "stages"
"""The kinds of collectives beside which the lost seconds of ranks are measured."""


def waiting_kind(operation: str, axis: str) -> str:
    """Return the kind of a collective: between stages, of tensor ranks, a sum, or of shards of parameters."""
    if axis == "tp":
        return TENSOR
    if operation in POINT_TO_POINT:
        return STAGES
    return SUMS if "allreduce" in operation else SHARDS


class _Estimate:
    """The parts of a step at one level of speed."""

    def __init__(self, plan: RunPlan, steps: Sequence[StepPlan], machine: Machine, speed: Speed) -> None:
        self._plan, self._steps, self._machine, self._speed = plan, steps, machine, speed
        self.timeline: Timeline | None = None

    def parts(self) -> dict[str, float]:
        """Return the seconds of each part."""
        if self._plan.pipeline is not None:
            return self._pipelined()
        (step,) = self._steps
        compute, host = self._compute(step)
        passes = (FORWARD, BACKWARD, RECOMPUTED)
        return {
            COMPUTE: sum(compute[phase] for phase in passes),
            COMMUNICATION: self._exposed(step, compute),
            COPIES: self._speed.host.seconds(step.totals.moved),
            BUBBLE: 0.0,
            OPTIMIZER: compute[OPTIMIZER_STEP],
            HOST: sum(host.values()),
        }

    def _compute(self, step: StepPlan) -> tuple[dict[str, float], dict[str, float]]:
        """Return the seconds of the device in each phase, and those in which it waits for the host."""
        device, issued = dict.fromkeys(PHASES, 0.0), dict.fromkeys(PHASES, 0.0)
        for kind, amount in step.totals.work.items():
            if not amount.number:
                continue
            issued[kind.phase] += amount.number * self._speed.operation
            if kind.operation != VIEW:
                flops, moved = amount.flops / amount.number, amount.num_bytes / amount.number
                each = operation_seconds(kind, flops, moved, self._speed)
                device[kind.phase] += amount.number * each
        if self._machine.is_cpu:
            return device, issued
        if self._plan.recipe.parallel.offload != "none":
            work = step.totals.work
            updated = sum(amount.num_bytes for kind, amount in work.items() if kind.phase == OPTIMIZER_STEP)
            device[OPTIMIZER_STEP] = self._speed.host.seconds(updated)  # the host's memory bounds its update
        if self._plan.recipe.cuda_graphs:  # the host launches one graph for the passes of a microbatch
            issued |= dict.fromkeys((FORWARD, BACKWARD, RECOMPUTED), 0.0)
        return device, {phase: max(0.0, issued[phase] - device[phase]) for phase in PHASES}

    def _communication(self, step: StepPlan, wanted: Callable[[str, str, str], bool]) -> tuple[float, int]:
        """Return the seconds and the calls of the collectives that `wanted` chooses by operation, axis and phase."""
        seconds, calls = 0.0, 0
        for collective, traffic in step.totals.traffic.items():
            axis = step.axes.get(collective.group, "all")
            if traffic.calls > 0 and wanted(collective.operation, axis, collective.phase):
                link = link_of(self._plan.layout, axis, self._machine.local_ranks)
                each = collective_seconds(collective.operation, traffic.num_bytes / traffic.calls, link, self._speed)
                seconds += traffic.calls * each
                calls += traffic.calls
        return seconds, calls

    def _waiting(self, step: StepPlan, phase: str) -> float:
        """Return the measured seconds that a rank loses beside the collectives of a phase."""
        seconds = 0.0
        for collective, traffic in step.totals.traffic.items():
            if collective.phase != phase:
                continue
            axis, calls = step.axes.get(collective.group, "all"), float(traffic.calls)
            if axis == "tp" and collective.operation in POINT_TO_POINT:
                # Around a ring, keys and values, or their gradients, are sent and received together: one wait.
                calls = calls / 2 if collective.operation == "send" else 0.0
            seconds += calls * self._speed.waiting.get(waiting_kind(collective.operation, axis), 0.0)
        return seconds

    def _exposed(self, step: StepPlan, compute: Mapping[str, float], phases: Iterable[str] = PHASES) -> float:
        """Return the seconds of collectives during which no device computes.

        DDP sums the buckets of gradients during the last backward pass. FSDP gathers a layer and scatters gradients
        during the computation of its neighbours. All other collectives are waited for, those around a ring too. There,
        a rank sends and receives at the same time, so only sending counts.
        """
        strategy = self._plan.strategy
        share = 1.0 if strategy.cuts_parameters else 1 / self._plan.batch.num_microbatches
        if strategy.zero_stage:  # the engine sets `overlap_comm` to false
            share = 0.0
        exposed = 0.0
        for phase in phases:
            exposed += self._waiting(step, phase)
            waited, _ = self._communication(
                step,
                lambda operation, axis, own, phase=phase: (  # type: ignore[misc]
                    own == phase
                    and (operation not in POINT_TO_POINT or (operation == "send" and axis == "tp"))
                    and (axis not in _DATA_AXES or phase == OPTIMIZER_STEP)
                ),
            )
            exposed += waited
            if phase == OPTIMIZER_STEP:
                continue
            hidden, calls = self._communication(
                step,
                lambda _, axis, own, phase=phase: own == phase and axis in _DATA_AXES,  # type: ignore[misc]
            )
            first = hidden / calls if calls else 0.0
            covered = min(hidden - first, compute[phase] * share) * self._machine.overlap
            exposed += hidden - covered
        return exposed

    def _pipelined(self) -> dict[str, float]:
        """Return the parts of a step of a pipeline; its slowest rank decides."""
        plan, pipeline = self._plan, self._plan.pipeline
        assert pipeline is not None
        found = [self._compute(step) for step in self._steps]
        number = plan.batch.num_microbatches * pipeline.stages_per_rank
        seconds: dict[str, list[float]] = defaultdict(list)  # of one action of each rank
        for step, (compute, host) in zip(self._steps, found, strict=True):
            forward = compute[FORWARD] + host[FORWARD] + self._exposed(step, compute, [FORWARD])
            behind = (BACKWARD, RECOMPUTED)
            backward = sum(compute[phase] + host[phase] for phase in behind) + self._exposed(step, compute, behind)
            seconds[FULL_FORWARD].append(forward / number)
            seconds[FULL_BACKWARD].append(backward / number)
        sent, calls = zip(
            *(
                self._communication(step, lambda operation, axis, _: operation in POINT_TO_POINT and axis != "tp")
                for step in self._steps
            ),
            strict=True,
        )
        send = sum(sent) / max(1, sum(calls))

        def cost(action: Action) -> float:
            rank = pipeline.rank_of(action.stage)
            if action.kind == FULL_FORWARD:
                return seconds[FULL_FORWARD][rank]
            whole = seconds[FULL_BACKWARD][rank]
            return whole if action.kind == FULL_BACKWARD else whole / 2

        order = order_of(pipeline)
        self.timeline = simulate(order, cost, send)
        without = simulate(order, cost, 0.0).seconds
        slowest = max(range(pipeline.num_ranks), key=self.timeline.busy)
        step, (compute, host) = self._steps[slowest], found[slowest]
        passes = (FORWARD, BACKWARD, RECOMPUTED)
        inside = self._exposed(step, compute, passes)
        return {
            COMPUTE: sum(compute[phase] for phase in passes),
            COMMUNICATION: inside
            + self._exposed(step, compute, [OPTIMIZER_STEP])
            + plan.batch.num_passes * (self.timeline.seconds - without),
            COPIES: self._speed.host.seconds(step.totals.moved),
            BUBBLE: plan.batch.num_passes * (without - self.timeline.busy(slowest)),
            OPTIMIZER: compute[OPTIMIZER_STEP],
            HOST: sum(host.values()),
        }
