"""The private members of `torch.distributed.pipelining` that this project overrides."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from trainer.base.internals import Internals
from trainer.parallel.pipeline.busy_clock import BusyClock

INTERNALS = Internals(
    "torch",
    "2.11 to 2.13",
    {
        "torch.distributed.pipelining:PipelineStage": [
            "forward_one_chunk",
            "backward_one_chunk",
            "backward_weight_one_chunk",
        ]
    },
)

VOTES = Internals(
    "torch", "2.13", {"torch.distributed.pipelining:PipelineStage": ["_warmup_forward_vote", "_warmup_backward_result"]}
)
"""The votes of the stages. Older versions have none, and a version without them needs none."""


class TimedStage(PipelineStage):
    """Torch's stage, with a clock around the computation of each microbatch.

    For each schedule, torch's stages vote whether all know their shapes: a message from rank to rank and back, and the
    host waits for it. Here they do. The first vote opens connections; later ones are left out.
    """

    def __init__(self, clock: BusyClock, votes: bool, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._clock, self._votes = clock, votes

    def _warmup_forward_vote(self, *args: Any, **kwargs: Any) -> Any:
        return super()._warmup_forward_vote(*args, **kwargs) if self._votes else torch.ones(1, dtype=torch.int64)

    def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> Any:
        return super()._warmup_backward_result(*args, **kwargs) if self._votes else torch.ones(1, dtype=torch.int64)

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return self._clock.run(lambda: PipelineStage.forward_one_chunk(self, *args, **kwargs))

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return self._clock.run(lambda: PipelineStage.backward_one_chunk(self, *args, **kwargs))

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return self._clock.run(lambda: PipelineStage.backward_weight_one_chunk(self, *args, **kwargs))
