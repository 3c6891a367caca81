"""The stages of one rank, run by a schedule of `torch.distributed.pipelining`.

Torch runs the schedule, and sends and receives tensors. This module creates its objects for the shapes of each pass.
All ranks of a pipeline read the same rows, so each stage knows these shapes without communication.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

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


class BusyClock:
    """A clock of the seconds in which this rank computes: the host's clock or, on a GPU, CUDA events."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._events: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._is_running = False

    def run(self, work: Callable[[], Any]) -> Any:
        self._is_running = True
        try:
            return self._timed(work, 1)
        finally:
            self._is_running = False

    def leave_out(self, wait: Callable[[], Any]) -> Any:
        """Run `wait`; within `run`, its time does not count."""
        return self._timed(wait, -1) if self._is_running else wait()

    def _timed(self, work: Callable[[], Any], sign: int) -> Any:
        if not self._on_gpu:
            start = time.perf_counter()
            try:
                return work()
            finally:
                self._seconds += sign * (time.perf_counter() - start)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        result = work()
        after.record()
        self._events.append((sign, before, after))
        # Without a wait, so that their number stays small.
        while self._events and self._events[0][2].query():  # type: ignore[no-untyped-call]
            self._count(*self._events.popleft())
        return result

    def _count(self, sign: int, before: torch.cuda.Event, after: torch.cuda.Event) -> None:
        self._seconds += sign * before.elapsed_time(after) / 1000

    def reset(self) -> None:
        self._seconds = 0.0
        self._events.clear()

    def read(self) -> float:
        """Return all seconds so far, after the device has finished."""
        while self._events:
            self._events[0][2].synchronize()
            self._count(*self._events.popleft())
        return self._seconds


class _TimedStage(PipelineStage):
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


class PipelineDriver:
    """The stages of one rank.

    Args:
        stages: the module of each stage, by its index in the pipeline. A module takes the tensors of the previous
            stage, and the inputs of the microbatch by name. It returns the tensors for the next stage, or the logits.
        schedule: a name of `SCHEDULE_CLASSES`.
        dtype: the type of the tensors between stages.
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
        self._dtype = dtype
        self._stages = stages
        self._num_stages = num_stages
        self._class = SCHEDULE_CLASSES[schedule]
        self._num_microbatches = num_microbatches
        self._group = group
        self._device = device
        self._loss: LossFunction
        self._made: dict[bool, tuple[Shapes, Any]] = {}  # the last schedules of training and evaluation
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
        made_for, schedule = self._made.get(is_training, ((), None))
        if made_for == shapes:
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
        self._made[is_training] = (shapes, schedule)
        self._is_connected = True
        return schedule

    def _loss_of_pass(self, logits: Tensor, number: Tensor) -> Tensor:
        return self._loss(logits, number)

    def _stage(self, index: int, shapes: Shapes, is_training: bool) -> _TimedStage:
        def examples(sender: int) -> tuple[Tensor, ...]:
            sent = shapes[sender] if 0 <= sender < len(shapes) else ()
            # Torch reads their shapes and types only, to allocate the memory in which it receives.
            return tuple(
                torch.empty(shape, dtype=self._dtype, device="meta", requires_grad=is_training) for shape in sent
            )

        # The last stage sends nothing, so torch never reads this shape.
        sent = examples(index) or (torch.empty(1, device="meta"),)
        return _TimedStage(
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
