"""What travels through a model: the rows of one forward pass, and the rows of one optimizer step of one rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

IGNORED_LABEL = -100
"""The label of what has none in token tasks, padding included: the default of `torch.nn.functional.cross_entropy`."""


@dataclass(frozen=True)
class Microbatch:
    """The rows of one forward pass.

    `inputs` are the model's keyword arguments, each `[batch, sequence]`; `labels` are `[batch]` or `[batch, sequence]`;
    `rows` `[batch]` (int64) is the place of each row in its global batch, which keys its dropout masks. A `filler`
    repeats a real row so that a rank without rows of its own joins the collectives; it must add nothing to the loss,
    the gradients or the metrics.
    """

    inputs: dict[str, Tensor]
    labels: Tensor
    rows: Tensor
    filler: bool = False

    def to(self, device: torch.device) -> Microbatch:
        """Copies to `device`, without waiting where the source is pinned."""
        return replace(
            self,
            inputs={name: tensor.to(device, non_blocking=True) for name, tensor in self.inputs.items()},
            labels=self.labels.to(device, non_blocking=True),
            rows=self.rows.to(device, non_blocking=True),
        )

    def pin_memory(self) -> Microbatch:
        """Copies to page-locked memory; the `DataLoader` calls this in its own thread."""
        return replace(
            self,
            inputs={name: tensor.pin_memory() for name, tensor in self.inputs.items()},
            labels=self.labels.pin_memory(),
            rows=self.rows.pin_memory(),
        )


@dataclass(frozen=True)
class RankBatch:
    """One rank's part of one global batch.

    Every rank holds equally many microbatches for the same step. `num_rows` and `num_tokens` (not padding) count the
    whole global batch over all ranks, known without communication.
    """

    microbatches: list[Microbatch]
    num_rows: int
    num_tokens: int

    def pin_memory(self) -> RankBatch:
        return replace(self, microbatches=[microbatch.pin_memory() for microbatch in self.microbatches])
