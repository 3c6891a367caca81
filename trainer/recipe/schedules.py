"""The table of pipeline schedules: the requirements and the bubble of each.

To add a schedule of `torch.distributed.pipelining`, add its row here, and its class in
`parallel/pipeline/stage_schedule.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PipelineSchedule:
    """Order in which stages process the microbatches of one pass."""

    name: str
    summary: str
    stages_per_rank: int = 1  # by default
    several_stages: bool = False  # supports and requires more than one stage per rank
    fills: bool = False  # requires at least as many microbatches as stages
    splits_backward: bool = False  # computes weight gradients later than input gradients, to fill idle time
    mapping: Literal["loop", "v"] = "loop"  # stages of rank r of P: r, r + P, ...; or r and 2P - 1 - r

    def bubble(self, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> float:
        """Return the fraction of a pass in which a rank idles, if all microbatches and stages have equal cost.

        Sources: Huang et al. 2019 (arXiv:1811.06965); Narayanan et al. 2021 (arXiv:2104.04473), section 2.2. For a
        split backward pass, Qi et al. 2023 (arXiv:2401.10241); backward takes twice as long as forward.
        """
        if self.mapping == "v" and num_microbatches >= 2 * num_ranks:
            return 0.0
        # In units that a rank idles P - 1 times: a whole microbatch, or a third of one if its backward pass is split.
        work = stages_per_rank * num_microbatches * (3 if self.splits_backward else 1)
        return (num_ranks - 1) / (work + num_ranks - 1)


SCHEDULES: dict[str, PipelineSchedule] = {
    row.name: row
    for row in (
        PipelineSchedule(
            "gpipe", "all forward passes, then all backward passes; with one microbatch, naive model parallelism"
        ),
        PipelineSchedule(
            "1f1b", "alternates forward and backward: at most as many microbatches in memory as stages", fills=True
        ),
        PipelineSchedule(
            "interleaved_1f1b",
            "as 1f1b, with several stages on each rank: smaller bubble, more communication",
            stages_per_rank=2,
            several_stages=True,
            fills=True,
        ),
        PipelineSchedule(
            "zero_bubble",
            "as interleaved_1f1b, with weight gradients computed while a stage would idle",
            stages_per_rank=2,
            several_stages=True,
            fills=True,
            splits_backward=True,
        ),
    )
}
SCHEDULE_NAMES = tuple(SCHEDULES)


def stages_of_rank(num_ranks: int, stages_per_rank: int, rank: int, mapping: Literal["loop", "v"]) -> tuple[int, ...]:
    """Return the stages of one pipeline rank, in order."""
    if mapping == "v":
        return (rank, 2 * num_ranks - 1 - rank)
    return tuple(rank + turn * num_ranks for turn in range(stages_per_rank))
