"""Plans of the ranks of a pipeline, from one microbatch in one stage of each kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from trainer.models.families.table import layers_of
from trainer.models.stage_split import split_stages
from trainer.parallel.placement import CONTEXT_AXIS
from trainer.recipe.plan import RunPlan
from trainer.recipe.schedules import SCHEDULES
from trainer.tools.plan.ledger import ACTIVATIONS, BATCH, GRADIENTS, LOSS, TEMPORARY, Peak
from trainer.tools.plan.simulated_step import plan_step, planned_model
from trainer.tools.plan.step_plan import StepPlan

_ONE_BY_ONE = "gpipe"  # the schedule in which a single microbatch runs
_REPEATED = ("gpipe", "1f1b")


def plan_steps(plan: RunPlan, length: int, cuda: bool = True, fused: bool = True) -> tuple[StepPlan, ...]:
    """Plan one rank of each pipeline stage; the others are like one of them.

    A stage is planned with one microbatch. Stages with equally many layers between the first and the last one are
    planned once, if the same parameters of these layers are trained. All microbatches are equal, and the schedule knows
    how many of them wait for their backward pass.
    Schedules with several stages on a rank or with split backward passes, and sharded parameters, run whole.
    The arguments are those of `plan_step`.

    Raises:
        UsageError: see `plan_step`.
    """
    size = plan.layout.world_size // plan.layout.pp  # pipeline ranks are outermost
    single = _with_one_microbatch(plan)
    stages = range(plan.layout.pp)
    kinds: Sequence[object] = stages
    if single is not plan:
        keys, last = plan.recipe.parallel.pipeline, plan.layout.pp - 1
        described = planned_model(plan)
        model = described.on_meta()
        described.adapt(model)
        late = {model.get_parameter(name) for name in described.groups(model).late}
        split = split_stages(model, plan.layout.pp, keys.split, keys.schedule)
        layers = layers_of(model)

        def trained(layer: str) -> tuple[tuple[bool, bool], ...]:
            return tuple((one.requires_grad, one in late) for one in layers[layer].parameters())

        kinds = [(stage == 0, stage == last, *map(trained, split.layers_of(stage))) for stage in stages]
    known: dict[object, StepPlan] = {}
    for stage, kind in enumerate(kinds):
        if kind not in known:
            known[kind] = plan_step(single, stage * size, length, cuda, fused)
    found = [replace(known[kind], rank=stage * size, stage=stage) for stage, kind in enumerate(kinds)]
    return tuple(found if single is plan else (_repeated(one, plan) for one in found))


def plan_rank(plan: RunPlan, rank: int, length: int) -> StepPlan:
    """Plan one rank on GPUs; see `plan_steps`."""
    single = _with_one_microbatch(plan)
    found = plan_step(single, rank, length)
    return found if single is plan else _repeated(found, plan)


def _with_one_microbatch(plan: RunPlan) -> RunPlan:
    """Return a plan with a single microbatch; the plan itself if its microbatches are not equal."""
    pipeline = plan.pipeline
    if pipeline is None or pipeline.schedule.name not in _REPEATED or plan.strategy.cuts_parameters:
        return plan
    rows = plan.batch.micro_batch_size * plan.batch.data_parallel_size
    return replace(
        plan,
        pipeline=replace(pipeline, schedule=SCHEDULES[_ONE_BY_ONE], num_microbatches=1),
        batch=replace(plan.batch, global_batch_size=rows, num_microbatches=1, num_passes=1),
    )


def _repeated(found: StepPlan, plan: RunPlan) -> StepPlan:
    """Return the result for all microbatches of a step from that for one.

    The buffers of received tensors and the rows of the batch stay for each microbatch of a pass. Activations stay for
    each microbatch in flight.
    """
    pipeline = plan.pipeline
    assert pipeline is not None
    number = pipeline.num_microbatches
    # 1F1B: stage s has at most as many microbatches in flight as there are stages from s on.
    flight = number if pipeline.schedule.name == "gpipe" else min(number, pipeline.num_ranks - found.stage)
    # Received tensors count as `LOSS`, because they are made outside of a module.
    more = Counter({LOSS: found.resident.get(LOSS, 0), BATCH: found.resident.get(BATCH, 0)})
    resident = Counter(found.resident) + _times(more, number - 1)
    held = Counter({ACTIVATIONS: found.held.get(ACTIVATIONS, 0)})
    # Buffers of received tensors stay resident, and `waiting` counts those of all microbatches.
    held[LOSS] = max(0, found.held.get(LOSS, 0) - more[LOSS])
    waiting = _times(more, number - 1)
    peaks = {}
    for place, peak in found.peaks.items():
        own = Counter(peak.by_component) + waiting
        later = Counter({**own, GRADIENTS: found.gradients}) if place.module or place.backward else own
        if found.stage > 0 and place.backward:
            later = later + Counter({TEMPORARY: _received_bytes(found)})
        # The first backward passes begin with all that is in flight. Gradients are whole in those after it.
        moments = [own if place.update else own + _times(held, flight - 1)]
        if number > flight and not place.update:
            moments.append(later + _times(held, flight - 1))
        elif number > 1 and place.backward:  # all are in flight, and one has left when gradients are whole
            moments.append(later + _times(held, flight - 2))
        most = max(moments, key=Counter.total)
        peaks[place] = Peak(most.total(), dict(most), place)
    early = found.early and _repeated(found.early, plan)
    passes = found.totals.of_microbatches(found.axes)
    # The plan of one microbatch holds one pass already, and the optimizer's work once.
    totals = found.totals.plus(passes, plan.batch.num_passes * number - 1)
    return replace(found, resident=dict(resident), peaks=peaks, totals=totals, early=early)


def _times(counts: Mapping[str, int], factor: int) -> Counter[str]:
    return Counter({key: factor * count for key, count in counts.items()})


def _received_bytes(found: StepPlan) -> int:
    """Return the bytes of the tensors that a stage gets for one microbatch from the stage before it."""
    return max(
        (
            t.num_bytes // t.calls
            for c, t in found.totals.traffic.items()
            if "recv" in c.operation and t.calls and found.axes.get(c.group) != CONTEXT_AXIS  # that is a ring
        ),
        default=0,
    )
