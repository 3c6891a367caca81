"""The table of pipeline schedules: one row says what a schedule asks for and how long its stages must idle.

To add a schedule of `torch.distributed.pipelining`, add its row here and its class in `parallel/pipeline.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PipelineSchedule:
    """How the microbatches of one pass go through the stages."""

    name: str
    summary: str
    stages_per_rank: int = 1  # by default
    several_stages: bool = False  # takes more than one stage for each rank
    fills: bool = False  # needs at least as many microbatches as there are stages
    splits_backward: bool = False  # gradients of inputs first, of weights when there is nothing else to do
    mapping: Literal["loop", "v"] = "loop"  # which stages lie on one rank: every P-th, or one down and one back up

    def bubble(self, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> float:
        """The share of a pass in which a stage idles, where all microbatches and stages cost the same.

        Huang et al. 2019 (arXiv:1811.06965), Narayanan et al. 2021 (arXiv:2104.04473), section 2.2, and for schedules
        that split the backward pass Qi et al. 2023 (arXiv:2401.10241), with a backward pass of twice the forward.
        """
        if self.mapping == "v" and num_microbatches >= 2 * num_ranks:
            return 0.0
        work = stages_per_rank * num_microbatches * (3 if self.splits_backward else 1)
        return (num_ranks - 1) / (work + num_ranks - 1)


SCHEDULES: dict[str, PipelineSchedule] = {
    row.name: row
    for row in (
        PipelineSchedule(
            "gpipe", "all forward passes, then all backward passes; with one microbatch: plain model parallelism"
        ),
        PipelineSchedule(
            "1f1b",
            "one forward, one backward in turn: no more microbatches in memory than there are stages",
            fills=True,
        ),
        PipelineSchedule(
            "interleaved_1f1b",
            "as 1f1b, with several stages on each rank: less idling, more messages",
            stages_per_rank=2,
            several_stages=True,
            fills=True,
        ),
        PipelineSchedule(
            "zero_bubble",
            "as interleaved_1f1b, with the gradients of weights put off to when a stage would idle",
            stages_per_rank=2,
            several_stages=True,
            fills=True,
            splits_backward=True,
        ),
    )
}
SCHEDULE_NAMES = tuple(SCHEDULES)


def stages_of_rank(num_ranks: int, stages_per_rank: int, rank: int, mapping: Literal["loop", "v"]) -> tuple[int, ...]:
    """The stages, in order, that one pipeline rank holds."""
    if mapping == "v":
        return (rank, 2 * num_ranks - 1 - rank)
    return tuple(rank + turn * num_ranks for turn in range(stages_per_rank))
