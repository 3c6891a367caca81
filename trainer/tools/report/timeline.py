"""The timeline of one pass through a pipeline: each rank works in the order of its schedule and waits for tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

from trainer.parallel.pipeline.stage_schedule import SCHEDULE_CLASSES
from trainer.recipe.plan import PipelinePlan

RUN_FORWARD, RUN_BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
"""The kinds of actions, by their letters in torch: forward; whole backward; and its two halves."""


class Action(NamedTuple):
    """The work of one stage on one microbatch."""

    kind: str
    stage: int
    microbatch: int


class Span(NamedTuple):
    """An action and its seconds since the start of the pass."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of each rank of the pipeline, in order."""

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def seconds(self) -> float:
        return max(spans[-1].end for spans in self.ranks)

    def busy(self, rank: int) -> float:
        """Return the seconds in which a rank computes."""
        return sum(span.end - span.start for span in self.ranks[rank])

    def idle_share(self, rank: int) -> float:
        """Return the share of the pass in which a rank waits."""
        return 1 - self.busy(rank) / self.seconds if self.seconds else 0.0

    def most_alive(self, rank: int) -> int:
        """Return the largest number of microbatches with activations on a rank, those of each stage counted."""
        now = most = 0
        for span in self.ranks[rank]:
            now += {RUN_FORWARD: 1, RUN_BACKWARD: -1, INPUT: 0, WEIGHT: -1}[span.action.kind]
            most = max(most, now)
        return most


def order_of(pipeline: PipelinePlan) -> list[list[Action]]:
    """Return the actions of each rank, in the order of torch's schedule."""
    stages, number, name = pipeline.num_stages, pipeline.num_microbatches, pipeline.schedule.name
    if not pipeline.schedule.several_stages:
        # The lists that torch makes of these two are not those of their loops (1f1b begins with the wrong microbatch).
        first = [number if name == "gpipe" else min(number, stages - stage) for stage in range(stages)]
        return [list(_one_stage(stage, number, warmup)) for stage, warmup in enumerate(first)]
    # A schedule of torch lists the actions of all ranks, so the stages of rank 0 are enough to make it.
    stand_ins = [
        SimpleNamespace(
            num_stages=stages,
            group_size=pipeline.num_ranks,
            group_rank=0,
            stage_index=stage,
            is_first=stage == 0,
            is_last=stage == stages - 1,
            submod=None,
        )
        for stage in pipeline.stages_of(0)
    ]
    made = SCHEDULE_CLASSES[name](stand_ins, number, loss_fn=lambda *_: None, scale_grads=False)
    return [
        [
            Action(action.computation_type.value, action.stage_index, action.microbatch_index)
            for action in made.pipeline_order[rank]
            if action is not None and action.computation_type.value in ACTION_NAMES
        ]
        for rank in range(pipeline.num_ranks)
    ]


def _one_stage(stage: int, number: int, warmup: int) -> Iterator[Action]:
    """Yield the actions of a rank with one stage: `warmup` forward passes, then backward and forward in turn."""
    for microbatch in range(warmup):
        yield Action(RUN_FORWARD, stage, microbatch)
    for microbatch in range(number):
        yield Action(RUN_BACKWARD, stage, microbatch)
        if warmup + microbatch < number:
            yield Action(RUN_FORWARD, stage, warmup + microbatch)


def simulate(order: Sequence[Sequence[Action]], cost: Callable[[Action], float], send: float) -> Timeline:
    """Return the timeline of an order of actions.

    Args:
        send: the seconds between the end of an action and the start of the next stage's on its tensors.
    """
    ranks = {action: rank for rank, actions in enumerate(order) for action in actions}
    sources = {action: [source for source in _sources(action) if source in ranks] for action in ranks}
    before = {action: first for actions in order for first, action in pairwise(actions)}
    # An order in which all ranks wait has a cycle, which raises an error.
    graph = {action: [*sources[action], *([before[action]] if action in before else [])] for action in ranks}
    spans: dict[Action, Span] = {}
    for action in TopologicalSorter(graph).static_order():
        free = spans[before[action]].end if action in before else 0.0
        arrivals = [spans[one].end + (send if ranks[one] != ranks[action] else 0.0) for one in sources[action]]
        start = max((free, *arrivals))
        spans[action] = Span(action, start, start + cost(action))
    return Timeline(tuple(tuple(map(spans.__getitem__, actions)) for actions in order))


def _sources(action: Action) -> Iterator[Action]:
    """Yield the actions that must end before this one, if they are part of the order."""
    kind, stage, microbatch = action
    if kind == RUN_FORWARD:
        yield Action(RUN_FORWARD, stage - 1, microbatch)
    elif kind == WEIGHT:
        yield Action(INPUT, stage, microbatch)
    else:
        yield Action(RUN_FORWARD, stage, microbatch)
        # A schedule has whole backward passes or their halves; the last stage has no next one.
        yield Action(RUN_BACKWARD, stage + 1, microbatch)
        yield Action(INPUT, stage + 1, microbatch)


def as_text(timeline: Timeline, width: int = 100) -> Iterator[str]:
    """Yield a line for each rank: actions begin with their microbatch and repeat their kind; dots are idle."""
    for rank, spans in enumerate(timeline.ranks):
        cells = ["."] * width
        for span in spans:
            first = round(span.start / timeline.seconds * width)
            until = max(first + 1, round(span.end / timeline.seconds * width))
            mark = span.action.kind if span.action.kind == RUN_FORWARD else span.action.kind.lower()
            cells[first:until] = f"{span.action.microbatch}{mark * width}"[: until - first]
        yield f"  rank {rank:<3} {''.join(cells[:width])}  idle {timeline.idle_share(rank):.0%}"


ACTION_COLOURS = {RUN_FORWARD: "#4878d0", RUN_BACKWARD: "#ee854a", INPUT: "#ee854a", WEIGHT: "#6acc64"}
ACTION_NAMES = {
    RUN_FORWARD: "forward", RUN_BACKWARD: "backward", INPUT: "gradients of inputs", WEIGHT: "gradients of weights",
}  # fmt: skip
