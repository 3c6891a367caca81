"""The time of a training step, from the work and the collectives that a plan counted and the speeds of a machine.

Costs of collectives follow the ring of Patarasuk and Yuan 2009 ("Bandwidth optimal all-reduce algorithms") and the tree
of Thakur et al. 2005 ("Optimization of collective communication operations in MPICH"); the faster one counts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from trainer.parallel.mesh import AXES, JOINT_AXES
from trainer.parallel.placement import CONTEXT_AXIS, EXPERT_AXIS, REPLICAS_AXIS, ROWS_AXIS, SHARDS_AXIS
from trainer.recipe.graphs_choice import LEAST_HOST_SHARE, auto_obstacle
from trainer.recipe.plan import Layout, RunPlan
from trainer.tools.plan.hardware import LEAST, LIKELY, MOST, Machine, Speed, kernel_name
from trainer.tools.plan.ledger import POINT_TO_POINT, Collective
from trainer.tools.plan.step_plan import StepPlan
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
    Amount,
    Kind,
)  # fmt: skip
from trainer.tools.report.timeline import RUN_BACKWARD, RUN_FORWARD, Action, Timeline, order_of, simulate

_TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int64: "int64", torch.bool: "bool",
    torch.float8_e4m3fn: "fp8",
}  # fmt: skip
_PASSES = (FORWARD, BACKWARD, RECOMPUTED)
_DATA_AXES = frozenset(("dp", "dp_replicate", "dp_shard", REPLICAS_AXIS, SHARDS_AXIS))
_ROWS_AXES = frozenset((ROWS_AXIS, *JOINT_AXES[ROWS_AXIS]))


@dataclass(frozen=True)
class StepTime:
    """The time of one optimizer step."""

    least: float  # the seconds if the device reaches the largest achievable share of its peaks
    likely: float  # the seconds in the middle
    most: float  # the seconds with the smallest share
    parts: Mapping[str, float]  # the likely seconds of each part; their sum is `likely`
    samples_per_second: float  # rows of the global batch per second
    tokens_per_second: float  # their tokens, with padding
    mfu: float  # the model's floating-point operations, without recomputation, as a share of the devices' peak
    hfu: float  # all floating-point operations of products, as a share of the devices' peak
    timeline: Timeline | None  # the likely timeline of one pass through the pipeline; None without one

    def times(self, factor: float) -> StepTime:
        """Return a step that takes so many times as long; the timeline stays."""
        if factor == 1:
            return self
        return StepTime(
            factor * self.least, factor * self.likely, factor * self.most,
            {part: factor * seconds for part, seconds in self.parts.items()}, self.samples_per_second / factor,
            self.tokens_per_second / factor, self.mfu / factor, self.hfu / factor, self.timeline,
        )  # fmt: skip


COMPUTE, COMMUNICATION, COPIES, BUBBLE, OPTIMIZER, HOST = (
    "compute", "exposed communication", "copies of offload", "pipeline bubble", "optimizer", "host",
)  # fmt: skip


def step_time(plan: RunPlan, steps: Sequence[StepPlan], machine: Machine, length: int = 1) -> StepTime:
    """Return the time of one optimizer step.

    `steps` has one rank of each pipeline stage; texts have `length` tokens.
    """
    machine = machine.with_tf32() if plan.recipe.tf32 else machine
    found = [_Estimate(plan, steps, machine, machine.speed(level)).parts() for level in (LEAST, LIKELY, MOST)]
    least, likely, most = (sum(parts.values()) for parts, _ in found)
    parts, timeline = found[LIKELY]
    samples = plan.batch.global_batch_size / likely
    of_model = of_device = 0.0  # seconds at the peak, of all stages
    for step in steps:
        for kind, amount in step.totals.work.items():
            peak = machine.peak(type_name(kind.dtype))
            of_model += amount.model_flops / peak
            of_device += amount.flops / peak
    mfu, hfu = (ideal / len(steps) / likely for ideal in (of_model, of_device))
    return StepTime(least, likely, most, parts, samples, samples * length, mfu, hfu, timeline)


def type_name(dtype: torch.dtype | None) -> str:
    """Return the name of a type in hardware files; types without a name count as fp32."""
    return _TYPES.get(dtype or torch.float32, "fp32")


def kernel_of(kind: Kind) -> str:
    """Return the name of an operation in hardware files, with the types of its operands."""
    name = kernel_name(kind.name, type_name(kind.dtype))
    return name if kind.mixed is None else f"{name} {str(kind.mixed).removeprefix('torch.')}"


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
    kernel = speed.kernels.get(kernel_of(kind))
    if kernel is None:
        moved = memory.seconds(num_bytes)
        return max(moved, product.seconds(flops)) if flops else moved
    general, size = (product, flops) if flops else (memory, num_bytes)
    nearest = min(max(size, kernel.points[0][0]), kernel.points[-1][0])
    # Beyond the measured sizes, only the ratio of the general cost is used.
    return kernel.seconds(nearest) * general.seconds(size) / general.seconds(nearest)


@dataclass(frozen=True)
class Link:
    """The way between the ranks of a group."""

    ranks: int  # the ranks of the group
    together: int  # its ranks on one machine
    local_ranks: int  # all ranks of a machine, which share its network

    @property
    def across(self) -> bool:
        """Whether the group is on several machines."""
        return self.ranks > self.together


def link_of(layout: Layout, axis: str, local_ranks: int) -> Link:
    """Return the link between the ranks along an axis, or between all ranks if the axis is unknown."""
    parts = JOINT_AXES.get(axis, (axis,) if axis in AXES else AXES)
    ranks = math.prod(layout.sizes[part] for part in parts)
    # Neighbours along an axis are so many ranks apart, because inner axes vary faster.
    stride = math.prod(layout.sizes[inner] for inner in AXES[AXES.index(parts[-1]) + 1 :])
    return Link(ranks, max(1, min(ranks, local_ranks // stride)), local_ranks)


def collective_seconds(operation: str, num_bytes: float, link: Link, speed: Speed) -> float:
    """Return the seconds of one collective.

    `num_bytes` are those of its largest tensor; `operation` is torch's name.
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
    # A sum for all ranks goes around twice: each rank first sums a part, then gets the parts of the others.
    rounds = 2 if "allreduce" in operation else 1
    ring = rounds * (ranks - 1) * send(num_bytes / ranks)
    tree = rounds * math.ceil(math.log2(ranks)) * send(num_bytes)
    return min(ring, tree)


SUMS, SHARDS, TENSOR, STAGES = "sums", "shards", "tensor", "stages"
"""The kinds of collectives beside which the lost seconds of ranks are measured."""


def _waiting_kind(operation: str, axis: str) -> str:
    """Return the kind of a collective: between stages, of tensor, context or expert ranks, a sum, or of shards."""
    if axis in _ROWS_AXES or axis == EXPERT_AXIS:
        return TENSOR
    if operation in POINT_TO_POINT:
        return STAGES
    return SUMS if "allreduce" in operation else SHARDS


class _Collective(NamedTuple):
    operation: str
    axis: str
    phase: str
    calls: int
    seconds: float
    behind: float  # the seconds of the work between their begin and the wait for them

    @property
    def is_waited_for(self) -> bool:
        """Whether its seconds count here: messages between stages do not, and around a ring only sending does."""
        return self.operation not in POINT_TO_POINT or (self.operation == "send" and self.axis == CONTEXT_AXIS)


class _Estimate:
    """The parts of a step at one level of speed."""

    def __init__(self, plan: RunPlan, steps: Sequence[StepPlan], machine: Machine, speed: Speed) -> None:
        self._plan, self._steps, self._machine, self._speed = plan, steps, machine, speed

    def parts(self) -> tuple[dict[str, float], Timeline | None]:
        """Return the seconds of each part, and the timeline of a pipeline; its slowest rank decides."""
        found = [self._compute(step) for step in self._steps]
        slowest, bubble, sent, timeline = self._pipelined(found)
        step, (compute, host) = self._steps[slowest], found[slowest]
        return {
            COMPUTE: sum(compute[phase] for phase in _PASSES),
            COMMUNICATION: self._exposed(step, compute) + sent,
            COPIES: self._speed.host.seconds(step.totals.moved),
            BUBBLE: bubble,
            OPTIMIZER: compute[OPTIMIZER_STEP],
            HOST: sum(host.values()),
        }, timeline

    def _compute(self, step: StepPlan) -> tuple[dict[str, float], dict[str, float]]:
        device, issued = dict.fromkeys(PHASES, 0.0), dict.fromkeys(PHASES, 0.0)
        for kind, amount in step.totals.work.items():
            if not amount.number:
                continue
            issued[kind.phase] += amount.number * self._speed.operation.seconds(amount.num_bytes / amount.number)
            device[kind.phase] += self._seconds_of(kind, amount)
        if self._machine.is_cpu:
            return device, issued
        if self._plan.recipe.parallel.offload != "none":
            work = step.totals.work
            updated = sum(amount.num_bytes for kind, amount in work.items() if kind.phase == OPTIMIZER_STEP)
            # With offload, the CPU updates.
            device[OPTIMIZER_STEP] = self._speed.host.seconds(updated)  # the host's memory bounds its update
        if self._is_captured(device, issued):  # the host launches one graph for the passes of a microbatch
            issued |= dict.fromkeys(_PASSES, 0.0)
        # On a GPU the host works ahead of the device, so only the rest beyond the device's time counts.
        return device, {phase: max(0.0, issued[phase] - device[phase]) for phase in PHASES}

    def _seconds_of(self, kind: Kind, amount: Amount) -> float:
        """Return the seconds of the operations of a kind on the device, which count as equal."""
        # A view costs the host a call and the device nothing.
        if kind.operation == VIEW or not amount.number:
            return 0.0
        flops, moved = amount.flops / amount.number, amount.num_bytes / amount.number
        return amount.number * operation_seconds(kind, flops, moved, self._speed)

    def _is_captured(self, device: Mapping[str, float], issued: Mapping[str, float]) -> bool:
        recipe, spent = self._plan.recipe, sum(max(device[phase], issued[phase]) for phase in PHASES)
        if recipe.cuda_graphs != "auto" or sum(issued.values()) < LEAST_HOST_SHARE * spent:
            return recipe.cuda_graphs is True
        return auto_obstacle(recipe) is None

    def _collectives(self, step: StepPlan) -> list[_Collective]:
        found = []
        behind: dict[Collective, float] = defaultdict(float)
        for (collective, kind), amount in step.totals.behind.items():
            behind[collective] += self._seconds_of(kind, amount)
        for collective, traffic in step.totals.traffic.items():
            # The difference of two plans may leave a kind without calls.
            if traffic.calls > 0:
                axis, calls = step.axis_of(collective), traffic.calls
                link = link_of(self._plan.layout, axis, self._machine.local_ranks)
                each = collective_seconds(collective.operation, traffic.num_bytes / calls, link, self._speed)
                found.append(
                    _Collective(collective.operation, axis, collective.phase, calls, calls * each, behind[collective])
                )
        return found

    def _waiting(self, collectives: Iterable[_Collective]) -> float:
        seconds = 0.0
        for one in collectives:
            calls = float(one.calls)
            if one.axis == CONTEXT_AXIS and one.operation in POINT_TO_POINT:
                # Around a ring, keys and values, or their gradients, are sent and received together: one wait.
                calls = calls / 2 if one.operation == "send" else 0.0
            seconds += calls * self._speed.waiting.get(_waiting_kind(one.operation, one.axis), 0.0)
        return seconds

    def _exposed(self, step: StepPlan, compute: Mapping[str, float], phases: Iterable[str] = PHASES) -> float:
        """Return the seconds of collectives during which no device computes.

        DDP sums the buckets of gradients during the last backward pass. FSDP gathers a layer and scatters gradients
        during the computation of its neighbours. Some sums of tensor ranks hide gradients of weights. All other
        collectives are waited for, those around a ring too. There, a rank sends and receives at the same time, so only
        sending counts.
        """
        exposed, share = 0.0, self._share_that_hides
        for phase in phases:
            own = [one for one in self._collectives(step) if one.phase == phase]
            exposed += self._waiting(own)
            over_data = [one for one in own if one.axis in _DATA_AXES]
            exposed += sum(
                one.seconds - min(one.seconds, one.behind) * self._machine.overlap
                for one in own
                if one.is_waited_for and (one.axis not in _DATA_AXES or phase == OPTIMIZER_STEP)
            )
            if phase == OPTIMIZER_STEP or not over_data:
                continue
            hidden = sum(one.seconds for one in over_data)
            # One has nothing to hide behind: the gather of the first layer, or the sum of the last bucket.
            first = hidden / sum(one.calls for one in over_data)
            exposed += hidden - min(hidden - first, compute[phase] * share) * self._machine.overlap
        return exposed

    @property
    def _share_that_hides(self) -> float:
        """The share of the computation behind which sums and gathers over data ranks may hide."""
        if self._plan.strategy.package:  # the engine sets `overlap_comm` to false
            return 0.0
        # DDP sums in the last of the microbatches only.
        return 1.0 if self._plan.strategy.cuts_parameters else 1 / self._plan.batch.num_microbatches

    def _pipelined(
        self, found: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]
    ) -> tuple[int, float, float, Timeline | None]:
        """Return the slowest rank, the seconds of its bubble and of messages between stages, and the timeline."""
        plan, pipeline = self._plan, self._plan.pipeline
        if pipeline is None:
            return 0, 0.0, 0.0, None
        # The totals of a rank hold each microbatch once for each of its stages, and an action is one of these.
        number = plan.batch.num_microbatches * pipeline.stages_per_rank
        seconds: dict[str, list[float]] = defaultdict(list)  # of one action of each rank
        for step, (compute, host) in zip(self._steps, found, strict=True):
            forward = compute[FORWARD] + host[FORWARD] + self._exposed(step, compute, [FORWARD])
            behind = (BACKWARD, RECOMPUTED)
            backward = sum(compute[phase] + host[phase] for phase in behind) + self._exposed(step, compute, behind)
            seconds[RUN_FORWARD].append(forward / number)
            seconds[RUN_BACKWARD].append(backward / number)
        messages = [
            one
            for step in self._steps
            for one in self._collectives(step)
            if one.operation in POINT_TO_POINT and one.axis != CONTEXT_AXIS
        ]
        # A timeline has one length of a message, so it is the mean over the messages of all stages.
        send = sum(one.seconds for one in messages) / max(1, sum(one.calls for one in messages))

        def cost(action: Action) -> float:
            rank = pipeline.rank_of(action.stage)
            if action.kind == RUN_FORWARD:
                return seconds[RUN_FORWARD][rank]
            whole = seconds[RUN_BACKWARD][rank]
            # A split backward pass is two actions, for inputs and for weights, with about the same work.
            return whole if action.kind == RUN_BACKWARD else whole / 2

        order = order_of(pipeline)
        timeline = simulate(order, cost, send)
        without = simulate(order, cost, 0.0).seconds
        slowest = max(range(pipeline.num_ranks), key=timeline.busy)
        # Two simulations, with and without messages, tell the bubble from the time of messages.
        bubble, sent = without - timeline.busy(slowest), timeline.seconds - without
        return slowest, plan.batch.num_passes * bubble, plan.batch.num_passes * sent, timeline
