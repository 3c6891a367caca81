"""The stages of one rank, run by a schedule of `torch.distributed.pipelining`.

Torch runs the schedule, and sends and receives tensors. This module creates its objects for the shapes of each pass.
All ranks of a pipeline read the same rows, so each stage knows these shapes without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from trainer.parallel.pipeline.busy_clock import BusyClock
from trainer.parallel.pipeline.torch_stage import INTERNALS, TimedStage

SCHEDULE_CLASSES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}
"""Torch's schedule classes, by the names of `recipe/schedules.py`."""

LossFunction = Callable[[Tensor, Tensor], Tensor]
Shapes = tuple[tuple[tuple[int, ...], ...], ...]
"""The shapes of the tensors that each stage except the last sends for one microbatch."""


class PipelineDriver:
    """The stages of one rank.

    Args:
        stages: the module of each stage, by its index in the pipeline. A module takes the tensors of the previous
            stage, and the inputs of the microbatch by name. It returns the tensors for the next stage, or the logits.
        schedule: a name of `SCHEDULE_CLASSES`.
        dtype: the type of the tensors between stages.

    Raises:
        UsageError: this version of torch lacks a member that the stages override.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        num_stages: int,
        schedule: str,
        num_microbatches: int,
        group: dist.ProcessGroup,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        INTERNALS.require("`parallel.pipeline.stages` above 1", "use `parallel.strategy` fsdp without stages")
        self._dtype = dtype
        self._stages = stages
        self._num_stages = num_stages
        self._class = SCHEDULE_CLASSES[schedule]
        self._num_microbatches = num_microbatches
        self._group = group
        self._device = device
        self._loss: LossFunction
        self._schedules: dict[bool, tuple[Shapes, Any]] = {}  # the last schedules of training and evaluation
        self._is_connected = False
        self.clock = BusyClock(device)

    @property
    def has_last_stage(self) -> bool:
        """Whether the loss is computed on this rank."""
        return self._num_stages - 1 in self._stages

    def train(self, inputs: Mapping[str, Tensor], shapes: Shapes, loss: LossFunction) -> Tensor:
        """Run forward and backward of one pass; gradients accumulate.

        Args:
            inputs: the inputs of all microbatches, each `[microbatches * rows, ...]`, on every stage.
            shapes: the shapes of the tensors between stages, each such as `[rows, positions, hidden]`.
            loss: a function of the logits of a microbatch and its index, an int64 tensor of one CPU element.

        Returns:
            The sum of the losses, a detached float64 scalar; zero on ranks without the last stage.
        """
        schedule = self._schedule(shapes, is_training=True)
        self._loss = loss
        losses: list[Tensor] = []
        # Torch cuts the target into microbatches as it cuts the inputs, so each loss learns its index.
        numbers = torch.arange(self._num_microbatches) if self.has_last_stage else None
        self._run(lambda: schedule.step(target=numbers, losses=losses, return_outputs=False, **inputs))
        if not losses:
            return torch.zeros((), device=self._device, dtype=torch.float64)
        # In fp64, so that the number of microbatches does not change the rounding of the sum.
        return torch.stack([value.detach() for value in losses]).double().sum()

    @torch.no_grad()
    def forward(self, inputs: Mapping[str, Tensor], shapes: Shapes) -> Tensor | None:
        """Run one pass without gradients; return the logits `[microbatches * rows, ...]` on the last stage's rank."""
        schedule = self._schedule(shapes, is_training=False)
        logits: Tensor | None = self._run(lambda: schedule.step(**inputs))
        return logits

    def _run(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except RuntimeError as error:
            # Torch wraps the error of a stage in a long one; the original error has the remedy.
            raise error.__cause__ or error from error.__cause__

    def _schedule(self, shapes: Shapes, is_training: bool) -> Any:
        """Return torch's schedule for these shapes; the last one is kept."""
        last_shapes, schedule = self._schedules.get(is_training, ((), None))
        if last_shapes == shapes:
            return schedule
        stages = [self._stage(index, shapes, is_training) for index in self._stages]
        # These two classes of torch take one stage, and the others take a list.
        single = issubclass(self._class, ScheduleGPipe | Schedule1F1B)
        schedule = self._class(
            stages[0] if single else stages,
            self._num_microbatches,
            loss_fn=self._loss_of_pass if is_training else None,
            scale_grads=False,  # the losses are sums and already divided
        )
        self._schedules[is_training] = (shapes, schedule)
        # The stages that were just made vote in their first pass; those of later shapes need no vote.
        self._is_connected = True
        return schedule

    def _loss_of_pass(self, logits: Tensor, number: Tensor) -> Tensor:
        return self._loss(logits, number)

    def _stage(self, index: int, shapes: Shapes, is_training: bool) -> TimedStage:
        def examples(sender: int) -> tuple[Tensor, ...]:
            sent = shapes[sender] if 0 <= sender < len(shapes) else ()
            # Torch reads their shapes and types only, to allocate the memory in which it receives.
            return tuple(
                torch.empty(shape, dtype=self._dtype, device="meta", requires_grad=is_training) for shape in sent
            )

        # The last stage sends nothing, so torch never reads this shape.
        sent = examples(index) or (torch.empty(1, device="meta"),)
        return TimedStage(
            self.clock if is_training else BusyClock(self._device),
            not self._is_connected,
            self._stages[index],
            index,
            self._num_stages,
            self._device,
            input_args=examples(index - 1),
            output_args=sent,
            group=self._group,
        )
